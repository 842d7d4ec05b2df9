// Attention of some queries that read the same keys: heads that share them, of tokens of one row.
//
// A query sees the committed columns of its row, then those staged ones that lie on its branch:
//
//   score    0 .. committed - 1 | committed .. keys - 1        in the order of positions
//   column   0 .. committed - 1 | staged[0] .. staged[keys - committed - 1]
//
// Columns are widened to float sixteen at a time and read by all queries. A score is a sum over the
// width, values are added in the order of positions: a query gets the same bits whoever is beside it.
#pragma once
#include <algorithm>

#include "lanes.hpp"

constexpr int QUERIES = 32;  // at once

struct Query {
  const float* q;
  float* out;  // [width]
  const int32_t* staged;
  int committed, keys;
};

struct Keys {
  const void* cache;
  int64_t keys, values;  // where this row and head begin, in numbers
  int width;
  float scale;
};

template <bool HALF>
static inline F read_cache(const void* p, int64_t at) {
  return HALF ? from_bf16((const uint16_t*)p + at) : load((const float*)p + at);
}

// Sixteen columns as float: [LANES, width]. Behind `count` the last one is repeated.
template <bool HALF, class Column>
static inline void widen(const Keys& from, int64_t base, int count, Column column, float* out) {
  for (int k = 0; k < LANES; ++k, out += from.width) {
    const int64_t at = base + (int64_t)column(std::min(k, count - 1)) * from.width;
    for (int d = 0; d < from.width; d += LANES) store(out + d, read_cache<HALF>(from.cache, at + d));
  }
}

// `parts`: sixteenths of the width; a template where it is a usual one.
template <int PARTS>
static inline F dots(const float* q, const float* block, int width) {
  const int parts = PARTS ? PARTS : width / LANES;
  return sums([&](int k) {
    F s = zero();
    for (int d = 0; d < parts; ++d) s = fma(load(q + d * LANES), load(block + k * width + d * LANES), s);
    return s;
  });
}

template <int PARTS>
static inline void add_values(const float* weight, int count, const float* block, int width, float* out) {
  constexpr int N = PARTS == 0 ? 1 : std::min(PARTS, 4);
  for (int d = 0; d < width; d += N * LANES) {
    F acc[N];
    for (int i = 0; i < N; ++i) acc[i] = load(out + d + i * LANES);
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < N; ++i)
        acc[i] = fma(all(weight[k]), load(block + k * width + d + i * LANES), acc[i]);
    for (int i = 0; i < N; ++i) store(out + d + i * LANES, acc[i]);
  }
}

// Scores to weights that sum to 1 with the factor that is returned.
static F softmax(float* score, int keys) {
  float top = -INFINITY;
  for (int j = 0; j < keys; ++j) top = std::max(top, score[j]);
  for (int j = keys; j % LANES; ++j) score[j] = -INFINITY;
  F total = zero();
  for (int j = 0; j < keys; j += LANES) {
    store(score + j, exp(load(score + j) - all(top)));
    if (keys - j < LANES)
      for (int i = keys; i < j + LANES; ++i) score[i] = 0;
    total = total + load(score + j);
  }
  return all(keys ? 1.0f / sum(total) : 0.0f);  // padding sees nothing
}

// For all blocks of sixteen keys: `use(first query, behind the last, first key, keys)` with `block`
// widened from `base`.
template <bool HALF, class Use>
static inline void in_blocks(const Keys& from, int64_t base, const Query* query, int count, float* block, Use use) {
  const int committed = query[0].committed;
  for (int j = 0; j < committed; j += LANES) {
    const int some = std::min(LANES, committed - j);
    widen<HALF>(from, base, some, [&](int k) { return j + k; }, block);
    use(0, count, j, some);
  }
  for (int i = 0, end; i < count; i = end) {
    const Query& one = query[i];
    for (end = i + 1; end < count && query[end].staged == one.staged && query[end].keys == one.keys;)
      ++end;  // of one token
    for (int j = committed; j < one.keys; j += LANES) {
      const int some = std::min(LANES, one.keys - j);
      widen<HALF>(from, base, some, [&](int k) { return one.staged[j - committed + k]; }, block);
      use(i, end, j, some);
    }
  }
}

// `score`: [count, row], a row is longer than any query's keys by 2 LANES; `block`: [LANES, width].
template <bool HALF, int PARTS>
static void attend_in(const Keys& from, const Query* query, int count, float* score, size_t row, float* block) {
  in_blocks<HALF>(from, from.keys, query, count, block, [&](int i, int end, int j, int) {
    for (; i < end; ++i)
      store(score + i * row + j, dots<PARTS>(query[i].q, block, from.width) * all(from.scale));
  });
  F by[QUERIES];
  for (int i = 0; i < count; ++i) {
    by[i] = softmax(score + i * row, query[i].keys);
    std::fill(query[i].out, query[i].out + from.width, 0.0f);
  }
  in_blocks<HALF>(from, from.values, query, count, block, [&](int i, int end, int j, int some) {
    for (; i < end; ++i) add_values<PARTS>(score + i * row + j, some, block, from.width, query[i].out);
  });
  for (int i = 0; i < count; ++i)
    for (int d = 0; d < from.width; d += LANES) store(query[i].out + d, load(query[i].out + d) * by[i]);
}

static void attend(bool half, const Keys& from, const Query* query, int count, float* score, size_t row, float* block) {
#define DS_ATTEND(PARTS)                                                       \
  if (half) attend_in<true, PARTS>(from, query, count, score, row, block);     \
  else attend_in<false, PARTS>(from, query, count, score, row, block);
  switch (from.width / LANES) {
    case 2: DS_ATTEND(2) break;
    case 4: DS_ATTEND(4) break;
    case 8: DS_ATTEND(8) break;
    default: DS_ATTEND(0)
  }
#undef DS_ATTEND
}
