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
  int width;  // a multiple of 32
  float scale;
};

template <bool HALF>
static inline F read_cache(const void* p, int64_t at) {
  return HALF ? from_bf16((const uint16_t*)p + at) : load((const float*)p + at);
}

// Columns stand side by side, but for staged ones: behind this one are those that are read soon.
template <bool HALF>
static inline void fetch_behind(const Keys& from, int width, int64_t at) {
  constexpr int SIZE = HALF ? 2 : 4;
  for (int d = 0; d < SIZE * width; d += 64) fetch_ahead((const uint8_t*)from.cache + SIZE * at + d);
}

// Sixteen columns as float: [LANES, width]. Behind `count` the last one is repeated.
template <bool HALF, class Column>
static inline void widen(const Keys& from, int width, int64_t base, int count, Column column, float* out) {
  for (int k = 0; k < LANES; ++k, out += width) {
    const int64_t at = base + (int64_t)column(std::min(k, count - 1)) * width;
    fetch_behind<HALF>(from, width, at);
    for (int d = 0; d < width; d += LANES) store(out + d, read_cache<HALF>(from.cache, at + d));
  }
}

// The same with a lane for each column: [width, LANES]. A score is then a sum along the lanes' own
// numbers, and nothing is added across them.
template <bool HALF, class Column>
static inline void widen_across(const Keys& from, int width, int64_t base, int count, Column column, float* out) {
  const int each = HALF ? 2 * LANES : LANES;  // numbers in the bits of a lane times their count
  int64_t at[LANES];
  for (int k = 0; k < LANES; ++k) {
    at[k] = base + (int64_t)column(std::min(k, count - 1)) * width;
    fetch_behind<HALF>(from, width, at[k]);
  }
  for (int d = 0; d < width; d += each) {
    I rows[LANES];
    for (int k = 0; k < LANES; ++k)
      rows[k] = HALF ? read_bits((const uint16_t*)from.cache + at[k] + d) : read_bits((const float*)from.cache + at[k] + d);
    transpose(rows);
    for (int i = 0; i < LANES; ++i, out += each) {
      if (!HALF) {
        store(out, as_float(rows[i]));
        continue;
      }
      store(out, low_half(rows[i]));
      store(out + LANES, high_half(rows[i]));
    }
  }
}

// Queries that are computed together: as many as there are registers for their sums.
constexpr int SIDE_BY_SIDE = DS_VNNI ? 4 : 1;

// Scores of sixteen keys, `block` being [width, LANES]; each is the sum of four sums.
template <int N>
static inline void scores(const Query* query, const float* block, int width, F by, float* score, size_t row) {
  F sums[N][4];
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < 4; ++k) sums[i][k] = zero();
  for (int d = 0; d < width; d += 4, block += 4 * LANES)
    for (int k = 0; k < 4; ++k) {
      F keys = load(block + k * LANES);
      in_registers(keys);
      for (int i = 0; i < N; ++i) sums[i][k] = fma(all(query[i].q[d + k]), keys, sums[i][k]);
    }
  for (int i = 0; i < N; ++i)
    store(score + i * row, ((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3])) * by);
}

// `PARTS`: sixteenths of the width, where it is a usual one; else 0.
template <int PARTS, int N>
static inline void add_values(
    const Query* query, const float* weight, size_t row, int count, const float* block, int width) {
  constexpr int P = PARTS == 0 ? 1 : std::min(PARTS, 4);
  for (int d = 0; d < width; d += P * LANES) {
    F acc[N][P];
    for (int i = 0; i < N; ++i)
      for (int p = 0; p < P; ++p) acc[i][p] = load(query[i].out + d + p * LANES);
    for (int k = 0; k < count; ++k)
      for (int p = 0; p < P; ++p) {
        F value = load(block + k * width + d + p * LANES);
        in_registers(value);
        for (int i = 0; i < N; ++i) acc[i][p] = fma(all(weight[i * row + k]), value, acc[i][p]);
      }
    for (int i = 0; i < N; ++i)
      for (int p = 0; p < P; ++p) store(query[i].out + d + p * LANES, acc[i][p]);
  }
}

// Scores to weights that sum to 1 with the factor that is returned.
static F softmax(float* score, int keys) {
  for (int j = keys; j % LANES; ++j) score[j] = -INFINITY;
  F most = all(-INFINITY), total = zero();
  for (int j = 0; j < keys; j += LANES) most = max(most, load(score + j));
  const F top = all(largest(most));
  for (int j = 0; j < keys; j += LANES) {
    store(score + j, exp(load(score + j) - top));
    if (keys - j < LANES)
      for (int i = keys; i < j + LANES; ++i) score[i] = 0;
    total = total + load(score + j);
  }
  return all(1.0f / sum(total));
}

// Whether what `one` sees of what is staged is the beginning of what `next` sees.
static inline bool begins(const Query& one, const Query& next) {
  if (one.keys > next.keys) return false;
  return one.staged == next.staged ||  // heads of one token
         std::equal(one.staged, one.staged + (one.keys - one.committed), next.staged);
}

// For all blocks of sixteen keys: `use(first query, behind the last, first key, keys)`, before which
// `read(keys, their columns)` has widened them.
template <class Read, class Use>
static inline void in_blocks(const Query* query, int count, Read read, Use use) {
  const int committed = query[0].committed;
  for (int j = 0; j < committed; j += LANES) {
    const int some = std::min(LANES, committed - j);
    read(some, [&](int k) { return j + k; });
    use(0, count, j, some);
  }
  for (int i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count && begins(query[end - 1], query[end]);) ++end;
    const Query& last = query[end - 1];  // of a chain: what the others see, and more
    for (int j = committed, first = i; j < last.keys; j += LANES) {
      const int some = std::min(LANES, last.keys - j);
      read(some, [&](int k) { return last.staged[j - committed + k]; });
      while (query[first].keys <= j) ++first;
      use(first, end, j, some);
    }
  }
}

// `score`: [count, row], a row is a multiple of LANES and longer than any query's keys by LANES or more;
// `block`: [LANES, width].
template <bool HALF, int PARTS>
static void attend_in(const Keys& from, const Query* query, int count, float* score, size_t row, float* block) {
  const F by = all(from.scale);
  const int width = PARTS ? PARTS * LANES : from.width;
  in_blocks(
      query, count,
      [&](int some, auto column) { widen_across<HALF>(from, width, from.keys, some, column, block); },
      [&](int i, int end, int j, int) {
        for (int n; i < end; i += n) {
          n = std::min(SIDE_BY_SIDE, end - i);
          with_number<SIDE_BY_SIDE>(n, [&](auto number) {
            scores<decltype(number)::value>(query + i, block, width, by, score + i * row + j, row);
          });
        }
      });
  F share[QUERIES];
  for (int i = 0; i < count; ++i) {
    share[i] = softmax(score + i * row, query[i].keys);
    std::fill(query[i].out, query[i].out + width, 0.0f);
  }
  in_blocks(
      query, count,
      [&](int some, auto column) { widen<HALF>(from, width, from.values, some, column, block); },
      [&](int i, int end, int j, int some) {
        auto own = [&](int n) { return std::min(some, query[n].keys - j); };
        for (int n; i < end; i += n) {
          for (n = 1; n < SIDE_BY_SIDE && i + n < end && own(i + n) == own(i);) ++n;
          with_number<SIDE_BY_SIDE>(n, [&](auto number) {
            add_values<PARTS, decltype(number)::value>(query + i, score + i * row + j, row, own(i), block, width);
          });
        }
      });
  for (int i = 0; i < count; ++i)
    for (int d = 0; d < width; d += LANES) store(query[i].out + d, load(query[i].out + d) * share[i]);
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
