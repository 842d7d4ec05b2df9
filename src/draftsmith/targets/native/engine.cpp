// A whole forward of a Llama-like decoder, for few tokens on a CPU.
//
// All threads run the same code and meet between its parts; there is nothing but arithmetic between
// the tokens that come in and the logits that go out. What is computed for a token depends on its
// own text and on nothing else, bit for bit: products in one order (matrix.hpp), norms, rotary embedding
// and softmax row by row in one order, attention over keys in the order of their positions.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "attention.hpp"
#include "matrix.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <unistd.h>

#include <chrono>
#include <cstdlib>

// ------------------------------------------------------------------------- threads that meet

static inline void breathe() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Meeting {
 public:
  explicit Meeting(int members) : members_(members) {}
  void wait() {
    int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      breathe();
      if (spins > 2000) std::this_thread::yield();  // more threads than processors
    }
  }

 private:
  const int members_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
};

class Team {
 public:
  explicit Team(int members) : members_(members) {
    for (int i = 1; i < members; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> guard(lock_);
      end_ = true;
      ++task_;
    }
    wake_.notify_all();
    for (auto& one : threads_) one.join();
  }
  int members() const { return members_; }
  template <class Body>
  void run(Body body) {  // body(member), in all of them
    call_ = [](void* what, int member) { (*(Body*)what)(member); };
    what_ = &body;
    left_.store(members_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> guard(lock_);
      task_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    body(0);
    for (int spins = 0; left_.load(std::memory_order_acquire); ++spins) {
      breathe();
      if (spins > 2000) std::this_thread::yield();
    }
  }

 private:
  void work(int member) {
    int seen = 0;
    while (true) {
      // The next call of a text follows within a millisecond or so, and waking up would take a tenth
      // of it. A pause lasts 15 ns on one processor and 60 on another, so a clock says how long.
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
      for (int spins = 1; task_.load(std::memory_order_acquire) == seen; ++spins) {
        breathe();
        if (spins % 256 == 0 && std::chrono::steady_clock::now() > until) break;
      }
      if (task_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return task_.load(std::memory_order_acquire) != seen; });
      }
      seen = task_.load(std::memory_order_acquire);
      if (end_) return;
      call_(what_, member);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }
  const int members_;
  std::vector<std::thread> threads_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::atomic<int> task_{0};
  std::atomic<int> left_{0};
  bool end_ = false;
  void (*call_)(void*, int) = nullptr;
  void* what_ = nullptr;
};

// All engines of a process share their threads: those of a second one would only wait, turning, on
// the processors that the first needs (a draft model beside its target).
struct Crew {
  const long process = getpid();
  std::mutex busy;  // callers take turns
  std::unique_ptr<Team> team;
  std::unique_ptr<Meeting> meeting;

  void gather(int threads) {
    if (team && team->members() == threads) return;
    team = std::make_unique<Team>(threads);
    meeting = std::make_unique<Meeting>(threads);
  }

  // A fork has none of the threads, and perhaps a lock that nobody will open: it gets a crew of its
  // own. None is ever freed: threads end with their process.
  static Crew& here() {
    static std::atomic<Crew*> all{nullptr};
    Crew* known = all.load(std::memory_order_acquire);
    while (!known || known->process != getpid()) {
      Crew* made = new Crew;
      if (all.compare_exchange_strong(known, made, std::memory_order_acq_rel)) return *made;
      delete made;  // another thread was first
    }
    return *known;
  }
};

struct Range {
  int from, to;
};
static inline Range share(int all, int member, int members) {
  return {(int)((int64_t)all * member / members), (int)((int64_t)all * (member + 1) / members)};
}

// ------------------------------------------------------------------------- what Python hands over

struct Layer {
  const float *norm_in, *norm_mlp, *norm_q, *norm_k;  // the last two or null
  Matrix qkv, out, gate_up, down;                     // gate_up: panels of gate and up by turns
};

// How a drafter makes what its layer reads of a token's embedding e and a state f, both H wide
// (drafters/hidden). Matrices without data are not there:
//
//   h = fc [e ; f]                                            fc alone: EAGLE, HASS
//   x = h + down silu(up [both(norm h) ; both(e)])            without gate: GRIFFIN
//   x = h + down (silu(gate e) * up (norm h))                 FSPAD
//
// With `beside` (EAGLE-3) h is fc f where f is as wide as fc, of the target's layers, and f itself
// where it is a state of the drafter; x = h, and attention reads [beside(e) ; norm h], 2 H wide. There a
// token that is not known (P-EAGLE) has the number behind the last, and e is `unknown`, or null: there is
// none.
struct Fusion {
  const float *norm, *both, *beside, *unknown;
  Matrix fc, gate, up, down;
};

// How a drafter of blocks drafts (drafters/parallel.py). Of its pairs, fc [e ; f], keys and values of
// `norm` pair are kept and nothing else. The places of a block begin as the last pair of their text and
// a mask of their own, and see all pairs and each other:
//
//   logits = head (out norm_out x) + added (before e)         e: embedding of the token before
//
// Without `before` there is no such term.
struct Places {
  int32_t count;  // of a block; 0: it drafts by pairs
  const float* masks;
  Matrix out, before, added;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, width, mlp;
  int32_t halves;  // 2: the last layer gives a state to predict from and one to go on with
  float eps, scale;
  const Layer* layer;
  const float* norm_out;  // or null
  Matrix embedding, head;
  Fusion fusion;  // without fc: a language model
  Places places;
};

// A block of tokens as Python lays it out, rows by places. Padding, which sees nothing, is not
// computed, and nothing is written for it:
//
//   tokens    . . a b        real   0 0 1 1        computed   a b c d e f
//             c d e f               1 1 1 1
//
// With `count` each row is so many tokens that go on with its text side by side, on the right: where they
// stand, and what they see, follows, and neither `see` nor what is said of columns is read.
struct Call {
  int32_t threads, rows, width, staged, keep, num_signals, last_hidden, cache_bf16, feature_width;
  const int64_t* count;              // [rows]; or null
  int64_t last;                      // with `count`: positions beyond this one stand still there
  const float* feature;              // [rows, width, feature_width], of a drafter
  const int64_t *token, *position;   // [rows, width]
  const uint8_t* see;                // [rows, width, staged]: what of the staged columns a token sees
  const int64_t* column;             // [rows, staged], in the cache
  const int64_t* slot;               // [rows, width], what a token writes; or null: from `first_slot` on
  int64_t first_slot;
  const int64_t* committed;          // [rows], columns that all tokens of a row see
  void* cache;                       // [2 layers, rows, kv_heads, columns, width]: k, v, k, v, ...
  int64_t layer_stride, row_stride, head_stride;  // in numbers
  float* logits;                     // [rows, keep, padded vocabulary], of the last places
  const int32_t* signal_at;          // layers whose outputs are wanted
  float* signal;                     // [rows, width, (signals + last_hidden) hidden]
  const float *cosine, *sine;        // [positions, width / 2]
};

// A chain, drafted behind the last token of each row of a `Call` with `count` that has one: of the most
// probable tokens, or of draws.
struct Chain {
  int32_t steps, vocab;               // vocab: of the head; without steps nothing is chosen
  const int64_t* token_of;            // row of the head -> token; or null: the same
  const double* uniform;              // [rows, steps] in [0, 1): tokens are drawn with these; or null
  double temperature;                 // of the draws; 1 without any
  double confidence;                  // a row ends behind the token that makes its chain less probable
  int64_t* count;                     // [rows], in: tokens that are wanted; out: those that it has
  int64_t* chosen;                    // [rows, steps] tokens
  float* scores;                      // [steps, rows, padded]: the laws of draws; or null
};

// The tokens that are computed, one behind the other.
struct Batch {
  int tokens = 0, longest = 0;                    // longest: keys that any token sees, at most
  int feature_width = 0;
  const float* feature = nullptr;
  float* logits = nullptr;
  std::vector<int64_t> token;
  std::vector<int32_t> position, row, slot, committed;
  std::vector<int32_t> place;                     // among those of the call: features, signals
  std::vector<int32_t> seen_from, seen;           // staged columns, ascending
  std::vector<int32_t> logit_at, logit_to;        // tokens whose logits are wanted, and where they go
  static constexpr size_t MOST_SEEN = 1 << 22;    // that are kept for the next call

  // False: it has a token that is none of the `known`; with `unknown`, the one behind them may stand behind
  // the first of those that logits are wanted of.
  bool lay_out(const Call& c, int64_t known, bool unknown = false) {
    if (seen.capacity() > MOST_SEEN) std::vector<int32_t>().swap(seen);  // of a long prompt
    for (auto* one : {&position, &row, &slot, &committed, &place, &seen_from, &seen, &logit_at, &logit_to})
      one->clear();
    token.clear();
    seen_from.push_back(0);
    longest = c.staged;
    for (int b = 0; b < c.rows; ++b) {
      longest = std::max(longest, (int)c.committed[b] + c.staged);
      const int first = c.count ? c.width - (int)c.count[b] : 0;
      for (int t = first; t < c.width; ++t) {
        const int at = b * c.width + t;
        if (c.count) {
          for (int k = 0; k <= t - first; ++k) seen.push_back((int32_t)c.committed[b] + k);
          position.push_back((int32_t)std::min(c.committed[b] + t - first, c.last));
          slot.push_back((int32_t)c.committed[b] + t - first);
        } else {
          const uint8_t* see = c.see + (size_t)at * c.staged;
          for (int k = 0; k < c.staged; ++k)
            if (see[k]) seen.push_back((int32_t)c.column[(size_t)b * c.staged + k]);
          if ((int)seen.size() == seen_from.back()) continue;
          position.push_back((int32_t)c.position[at]);
          slot.push_back((int32_t)(c.slot ? c.slot[at] : c.first_slot + t));
        }
        if (c.token[at] < 0 || c.token[at] >= known + (unknown && t > c.width - c.keep)) return false;
        seen_from.push_back((int32_t)seen.size());
        token.push_back(c.token[at]);
        row.push_back(b);
        committed.push_back((int32_t)c.committed[b]);
        place.push_back(at);
        if (t < c.width - c.keep) continue;
        logit_at.push_back((int32_t)token.size() - 1);
        logit_to.push_back(b * c.keep + t - (c.width - c.keep));
      }
    }
    tokens = (int)token.size();
    feature = c.feature, feature_width = c.feature_width, logits = c.logits;
    return true;
  }
};

constexpr int CHUNK = 64;  // tokens that pass a layer together

// ------------------------------------------------------------------------- rows

static void normalise(const float* x, const float* weight, float eps, int n, float* out) {
  F squares = zero();
  for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  F by = all(1.0f / std::sqrt(sum(squares) / n + eps));
  for (int i = 0; i < n; i += LANES) store(out + i, load(weight + i) * (load(x + i) * by));
}

static inline F silu(F v) { return v / (all(1.0f) + exp(zero() - v)); }

// To 8 bits, as the matrix wants it: one scale per group of the row, `tokens` apart.
static void quantise(const Matrix& m, const float* x, int tokens, int8_t* q, float* scale, float* total) {
  for (int g = 0; g < m.groups(); ++g, x += m.group, q += m.group, scale += tokens, total += tokens) {
    F most = zero();
    for (int i = 0; i < m.group; i += LANES) most = max(most, abs(load(x + i)));
    float top = largest(most);
    float s = top / 127.0f;
    F by = all(top > 1e-30f ? 127.0f / top : 0.0f), counted = zero();
    for (int i = 0; i < m.group; i += LANES) {
      F whole = nearest(load(x + i) * by);
      counted = counted + whole;
      to_int8(q + i, whole);
    }
    *scale = s;
    *total = s * sum(counted);  // whole numbers below 2^24: exact
    if (OFFSET && m.format == INT8)
      for (int i = 0; i < m.group; ++i) q[i] = (int8_t)(q[i] ^ -128);
  }
}

static float largest_of(const float* x, int n) {
  float top = -INFINITY;
  int i = 0;
  if (n >= 2 * LANES) {  // two at a time: each waits for the one before
    F one = load(x), other = load(x + LANES);
    for (i = 2 * LANES; i + 2 * LANES <= n; i += 2 * LANES) {
      one = max(one, load(x + i));
      other = max(other, load(x + i + LANES));
    }
    top = largest(max(one, other));
  }
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// The first of the largest numbers of x[from .. to), and where it is. Where some are NaN, any place: verification
// will say so.
struct Top {
  float score = -INFINITY;
  int64_t place = 0;

  void look(const float* x, int from, int to) {
    constexpr int AT_ONCE = 256;
    for (int i = from; i < to; i += AT_ONCE) {
      const int end = std::min(i + AT_ONCE, to);
      const float most = largest_of(x + i, end - i);
      if (!(most > score)) continue;
      score = most;
      place = std::find(x + i, x + end, most) - x;
    }
  }
};

// Weights of places, and a place by a share of their mass, found by blocks and then within one.
struct Mass {
  static constexpr int BLOCK = 256, SUMS = 8;

  Lines<float> weight;
  std::vector<double> block;  // sums, in double: one of 50,000 places may weigh little
  double total = 0;

  // Of softmax(x / temperature), not normalised; behind the last of n places there is nothing.
  // False: a number is NaN, or none is finite.
  bool of_scores(const float* x, int n, double temperature) {
    weight.resize((n + BLOCK - 1) / BLOCK * BLOCK);
    std::fill(weight.begin() + n, weight.end(), 0.0f);
    const float largest = largest_of(x, n);
    const F top = all(largest), by = all((float)(1 / temperature)), none = all(1.7e-38f);
    F odd = zero();
    auto weigh = [&](F v) {
      odd = fma(v, zero(), odd);  // NaN from what is not finite
      return max(exp((v - top) * by) - none, zero());  // exp ends at 1e-38
    };
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(weight.data() + i, weigh(load(x + i)));
    if (i < n) {
      float rest[LANES];
      std::fill(rest, rest + LANES, largest);
      std::copy(x + i, x + n, rest);
      store(rest, weigh(load(rest)));
      std::copy(rest, rest + n - i, weight.data() + i);
    }
    add_up();
    const bool suspect = !(sum(odd) == 0.0f);  // -inf is no fault: such a token is forbidden
    return std::isfinite(largest) && !(suspect && std::any_of(x, x + n, [](float v) { return std::isnan(v); }));
  }

  void add_up() {
    block.resize(weight.size() / BLOCK);
    total = 0;
    for (size_t b = 0; b < block.size(); ++b) {
      const float* w = weight.data() + b * BLOCK;
      double sums[SUMS] = {};
      for (int i = 0; i < BLOCK; i += SUMS)
        for (int k = 0; k < SUMS; ++k) sums[k] += w[i + k];
      block[b] = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
      total += block[b];
    }
  }

  // The sum over all places of min(share p, q), q of these places (null: all), each once but for those that
  // fill up, whose q is 0.
  double overlap(double share, const float* q, const int64_t* ids, int count) const {
    const float by = (float)(share / total);
    double sums[SUMS] = {};
    int i = 0;
    auto add = [&](int k, int at) { sums[k] += std::min(by * weight[ids ? ids[at] : at], q[at]); };
    for (; i + SUMS <= count; i += SUMS)
      for (int k = 0; k < SUMS; ++k) add(k, i + k);
    for (; i < count; ++i) add(0, i);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }

  // Less q, scaled to `times` the weights' sum, of these places (null: all). False: that leaves nothing,
  // and the weights are gone.
  bool take_away(const float* q, const int64_t* ids, int count, double times = 1) {
    const float by = (float)(total * times);
    for (int i = 0; i < count; ++i) {
      float& w = weight[ids ? ids[i] : i];
      w = std::max(w - by * q[i], 0.0f);
    }
    add_up();
    return total > 0;
  }

  // The place left of which a share u of the mass lies: never one without weight.
  int64_t place(double u) const {
    const double aim = u * total;
    double left = 0, before = 0;
    size_t at = 0;  // the last block with weight, should rounding put the aim behind all
    for (size_t b = 0; b < block.size(); ++b) {
      if (block[b] > 0) {
        at = b, before = left;
        if (left + block[b] > aim) break;
      }
      left += block[b];
    }
    int64_t last = (int64_t)at * BLOCK;
    for (int64_t i = last, end = last + BLOCK; i < end; ++i)
      if (weight[i] > 0) {
        last = i;
        if ((before += weight[i]) > aim) break;
      }
    return last;
  }
};

// What softmax(x / temperature) gives to this place. x is padded.
static double probability(const float* x, int n, double temperature, int64_t place) {
  const F top = all(largest_of(x, n)), by = all((float)(1 / temperature));
  F sums = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) sums = sums + exp((load(x + i) - top) * by);
  double total = sum(sums);
  float rest[LANES], own[LANES];
  if (i < n) store(rest, exp((load(x + i) - top) * by));
  for (int k = 0; i + k < n; ++k) total += rest[k];
  store(own, exp((all(x[place]) - top) * by));
  return own[0] / total;
}

static void write_cache(void* p, int64_t at, const float* x, int n, bool half) {
  if (!half) {
    std::memcpy((float*)p + at, x, 4 * n);
    return;
  }
  uint16_t* to = (uint16_t*)p + at;
  for (int i = 0; i < n; ++i) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    to[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
}

static void read_row(const Matrix& m, int64_t r, float* out) {
  const int panel = (int)(r / LANES), lane = (int)(r % LANES);
  const uint8_t* w = m.data + panel * m.panel_bytes();
  if (m.format == FLOAT32)
    for (int k = 0; k < m.cols; ++k) out[k] = ((const float*)w)[k * LANES + lane];
  if (m.format == BFLOAT16)
    for (int k = 0; k < m.cols; ++k) {
      uint32_t bits = (uint32_t)((const uint16_t*)w)[(k / 2 * LANES + lane) * 2 + k % 2] << 16;
      std::memcpy(out + k, &bits, 4);
    }
  for (int g = 0; g < m.groups(); ++g, out += m.group) {
    const size_t at = (size_t)panel * m.groups() + g;
    if (m.format == INT8) {
      const float d = ((const float*)m.scales)[at * LANES + lane];
      for (int k = 0; k < m.group; k += 4, w += 4 * LANES)
        for (int i = 0; i < 4; ++i) out[k + i] = d * (int8_t)w[lane * 4 + i];
    } else {
      float d[LANES], least[LANES];
      const uint16_t* dm = (const uint16_t*)m.scales + at * 2 * LANES;
      store(d, from_half(dm));
      store(least, from_half(dm + LANES));
      for (int k = 0; k < m.group; k += 8, w += 4 * LANES)
        for (int i = 0; i < 4; ++i) {
          const int both = w[lane * 4 + i];
          out[k + i] = d[lane] * (both & 15) + least[lane];
          out[k + 4 + i] = d[lane] * (both >> 4) + least[lane];
        }
    }
  }
}

// ------------------------------------------------------------------------- products by a team

// Threads, and what they quantise and normalise on the way to a product.
struct Products {
  static constexpr int ALONE = 4;  // so few tokens every thread quantises for itself: no meeting

  float eps;
  Team* team = nullptr;
  Meeting* meeting = nullptr;
  Lines<float> normed;
  struct Own {  // of one thread
    Lines<int8_t> q;
    Lines<float> scale, total, score, block, head;
    Mass mass;
    std::vector<Top> top;  // of the scores that it has computed, by row
  };
  std::vector<Own> own;
  Lines<int8_t> q;  // shared: chunks of many tokens
  Lines<float> scale, total;
  const size_t most;  // numbers of a token

  Products(float eps, int tokens, int most) : eps(eps), most(most) {
    normed.resize((size_t)tokens * most);
    q.resize((size_t)tokens * most);
    scale.resize((size_t)tokens * most / 16);
    total.resize((size_t)tokens * most / 16);
  }

  void gather(Crew& crew, int threads) {
    crew.gather(threads);
    team = crew.team.get();
    meeting = crew.meeting.get();
    if ((int)own.size() >= threads) return;
    own.resize(threads);
    for (auto& one : own) {
      one.q.resize(ALONE * most);
      one.scale.resize(ALONE * most / 16);
      one.total.resize(ALONE * most / 16);
    }
  }

  // What `matrix` reads of `x` [tokens, cols]; with `norm`, of its normalised rows.
  Input ready(int member, const Matrix& matrix, const float* x, int tokens, const float* norm) {
    const int n = matrix.cols;
    if (!norm && !matrix.whole()) return {x, nullptr, nullptr, nullptr, n, tokens};
    const bool alone = tokens <= ALONE && matrix.whole();
    Own& mine = own[member];
    int8_t* to = alone ? mine.q.data() : q.data();
    float* scales = alone ? mine.scale.data() : scale.data();
    float* totals = alone ? mine.total.data() : total.data();
    const Range some = alone ? Range{0, tokens} : share(tokens, member, team->members());
    if (norm && alone) mine.head.resize(n);
    for (int t = some.from; t < some.to; ++t) {
      const float* row = x + (size_t)t * n;
      if (norm) {
        float* out = alone ? mine.head.data() : normed.data() + (size_t)t * n;
        normalise(row, norm, eps, n, out);
        row = out;
      }
      if (matrix.whole()) quantise(matrix, row, tokens, to + (size_t)t * n, scales + t, totals + t);
    }
    if (!alone) meeting->wait();
    return {norm ? normed.data() : x, to, scales, totals, n, tokens};
  }

  template <class Write>
  void product(int member, const Matrix& m, const Input& in, int tokens, int step, Write write) {
    Range some = share(m.panels() / step, member, team->members());
    multiply(m, in, some.from * step, some.to * step, tokens, write);
  }
};

// ------------------------------------------------------------------------- the forward

struct Engine : Products {
  Model model;
  std::vector<Layer> layers;
  Lines<float> hidden, qkv, mixed, inner;
  Lines<float> pair, regress, state, found, low;  // of drafters and chains
  Batch batch;

  // The most numbers that a product reads of a token.
  static int widest(const Model& m) {
    const int layer = std::max({m.hidden, m.mlp, m.heads * m.width, m.places.added.cols});
    return m.fusion.fc.data ? std::max(layer, std::max(2 * m.hidden, m.fusion.fc.cols)) : layer;
  }

  explicit Engine(const Model& given)
      : Products(given.eps, CHUNK, widest(given)), model(given), layers(given.layer, given.layer + given.layers) {
    const bool pairs = model.fusion.fc.data;
    hidden.resize((size_t)CHUNK * model.hidden);
    qkv.resize((size_t)CHUNK * layers[0].qkv.panels() * LANES);
    mixed.resize((size_t)CHUNK * model.heads * model.width);
    inner.resize((size_t)CHUNK * model.mlp);
    if (pairs) pair.resize((size_t)CHUNK * std::max(2 * model.hidden, model.fusion.fc.cols));
    if (model.halves == 2) regress.resize(hidden.size());
    low.resize((size_t)CHUNK * model.places.added.cols);
  }

  void add(int member, const Matrix& m, const Lines<float>& x, int tokens) {
    Input in = ready(member, m, x.data(), tokens, nullptr);
    product(member, m, in, tokens, 1, [&](int t, int r, F v) {
      float* to = hidden.data() + (size_t)t * model.hidden + r;
      store(to, load(to) + v);
    });
  }

  // To `hidden` the residual, to `pair` what attention reads beside it.
  void fuse_beside(int member, int first, int tokens) {
    const Fusion& f = model.fusion;
    const int H = model.hidden, S = batch.feature_width;
    const Range some = share(tokens, member, team->members());
    float* given = S == H ? hidden.data() : pair.data();
    for (int t = some.from; t < some.to; ++t)
      std::memcpy(given + (size_t)t * S, batch.feature + (size_t)batch.place[first + t] * S, 4 * S);
    meeting->wait();
    if (S != H) {
      Input in = ready(member, f.fc, pair.data(), tokens, nullptr);
      product(member, f.fc, in, tokens, 1, [&](int t, int r, F v) { store(hidden.data() + (size_t)t * H + r, v); });
      meeting->wait();
    }
    for (int t = some.from; t < some.to; ++t) {
      float* e = pair.data() + (size_t)t * 2 * H;
      if (batch.token[first + t] == model.embedding.rows) std::memcpy(e, f.unknown, 4 * H);
      else read_row(model.embedding, batch.token[first + t], e);
      normalise(e, f.beside, eps, H, e);
      normalise(hidden.data() + (size_t)t * H, f.norm, eps, H, e + H);
    }
    meeting->wait();
  }

  // What the layer of a drafter reads of tokens and states, to `hidden`.
  void fuse(int member, int first, int tokens) {
    const Fusion& f = model.fusion;
    if (f.beside) return fuse_beside(member, first, tokens);
    const int H = model.hidden, S = f.fc.cols - H;
    const Range some = share(tokens, member, team->members());
    auto e = [&](int t) { return pair.data() + (size_t)t * (H + S); };
    for (int t = some.from; t < some.to; ++t) {
      read_row(model.embedding, batch.token[first + t], e(t));
      std::memcpy(e(t) + H, batch.feature + (size_t)batch.place[first + t] * S, 4 * S);
    }
    meeting->wait();
    {
      Input in = ready(member, f.fc, pair.data(), tokens, nullptr);
      product(member, f.fc, in, tokens, 1, [&](int t, int r, F v) { store(hidden.data() + (size_t)t * H + r, v); });
    }
    meeting->wait();
    if (!f.down.data) return;
    auto to = [&](int t, int r) { return inner.data() + (size_t)t * model.mlp + r; };
    if (f.gate.data) {
      // e lies in rows of 2 H: moved together, first rows first
      if (member == 0)
        for (int t = 1; t < tokens; ++t) std::memmove(pair.data() + (size_t)t * H, e(t), 4 * H);
      meeting->wait();
      Input in = ready(member, f.gate, pair.data(), tokens, nullptr);
      product(member, f.gate, in, tokens, 1, [&](int t, int r, F v) { store(to(t, r), silu(v)); });
      meeting->wait();
      in = ready(member, f.up, hidden.data(), tokens, f.norm);
      product(member, f.up, in, tokens, 1, [&](int t, int r, F v) { store(to(t, r), load(to(t, r)) * v); });
    } else {
      for (int t = some.from; t < some.to; ++t) {
        normalise(e(t), f.both, eps, H, e(t) + H);
        normalise(hidden.data() + (size_t)t * H, f.norm, eps, H, e(t));
        normalise(e(t), f.both, eps, H, e(t));
      }
      meeting->wait();
      Input in = ready(member, f.up, pair.data(), tokens, nullptr);
      product(member, f.up, in, tokens, 1, [&](int t, int r, F v) { store(to(t, r), silu(v)); });
    }
    meeting->wait();
    add(member, f.down, inner, tokens);
    meeting->wait();
  }

  // Queries in the order (shared head, token, its heads): neighbours read the same keys.
  void attention(int member, const Call& c, int number, int first, int tokens) {
    const int width = model.width, kv = model.kv_heads, group = model.heads / kv;
    const int qkv_row = layers[number].qkv.panels() * LANES;
    const size_t row = (batch.longest / LANES + 2) * LANES;
    Own& mine = own[member];
    if (mine.score.size() < QUERIES * row) mine.score.resize(QUERIES * row);
    mine.block.resize(LANES * width);
    const Range some = share(tokens * model.heads, member, team->members());
    for (int i = some.from; i < some.to;) {
      const int shared = i / (tokens * group), text = batch.row[first + i / group % tokens];
      Query queries[QUERIES];
      int count = 0;
      for (; i < some.to && count < QUERIES; ++i, ++count) {
        const int t = i / group % tokens, n = first + t, h = shared * group + i % group;
        if (i / (tokens * group) != shared || batch.row[n] != text) break;
        queries[count] = {
            qkv.data() + (size_t)t * qkv_row + h * width,
            mixed.data() + ((size_t)t * model.heads + h) * width,
            batch.seen.data() + batch.seen_from[n],
            batch.committed[n],
            batch.committed[n] + batch.seen_from[n + 1] - batch.seen_from[n],
        };
      }
      const int64_t keys = 2 * number * c.layer_stride + text * c.row_stride + shared * c.head_stride;
      const Keys from{c.cache, keys, keys + c.layer_stride, width, model.scale};
      attend(c.cache_bf16, from, queries, count, mine.score.data(), row, mine.block.data());
    }
  }

  // Norms of heads, rotary embedding, and keys and values to the cache; of the heads from `begin` on.
  void turn(int member, const Call& c, int number, int first, int tokens, int begin) {
    const Layer& l = layers[number];
    const int width = model.width, heads = model.heads, kv = model.kv_heads, half = width / 2;
    const int all_heads = heads + 2 * kv - begin, row = l.qkv.panels() * LANES;
    const Range some = share(tokens * all_heads, member, team->members());
    for (int i = some.from; i < some.to; ++i) {
      const int t = i / all_heads, h = begin + i % all_heads, n = first + t;
      float* x = qkv.data() + (size_t)t * row + h * width;
      if (h < heads + kv) {
        const float* norm = h < heads ? l.norm_q : l.norm_k;
        if (norm) normalise(x, norm, eps, width, x);
        const float* cosine = c.cosine + (size_t)batch.position[n] * half;
        const float* sine = c.sine + (size_t)batch.position[n] * half;
        for (int d = 0; d < half; d += LANES) {
          F a = load(x + d), b = load(x + half + d), co = load(cosine + d), si = load(sine + d);
          store(x + d, a * co - b * si);
          store(x + half + d, b * co + a * si);
        }
      }
      if (h >= heads) {
        const int value = h >= heads + kv, which = h - heads - value * kv;
        const int64_t at = (2 * number + value) * c.layer_stride + batch.row[n] * c.row_stride +
                           which * c.head_stride + (int64_t)batch.slot[n] * width;
        write_cache(c.cache, at, x, width, c.cache_bf16);
      }
    }
  }

  void layer_forward(int member, const Call& c, int number, int first, int tokens) {
    const Layer& l = layers[number];
    const int row = l.qkv.panels() * LANES;
    {
      const float* x = model.fusion.beside && !number ? pair.data() : hidden.data();
      Input in = ready(member, l.qkv, x, tokens, l.norm_in);
      product(member, l.qkv, in, tokens, 1, [&](int t, int r, F v) { store(qkv.data() + (size_t)t * row + r, v); });
    }
    meeting->wait();
    turn(member, c, number, first, tokens, 0);
    meeting->wait();
    attention(member, c, number, first, tokens);
    meeting->wait();
    add(member, l.out, mixed, tokens);
    meeting->wait();
    {
      Input in = ready(member, l.gate_up, hidden.data(), tokens, l.norm_mlp);
      F gate[CHUNK];
      product(member, l.gate_up, in, tokens, 2, [&](int t, int r, F v) {
        if (r / LANES % 2 == 0) gate[t] = v;
        else {
          store(inner.data() + (size_t)t * model.mlp + r / (2 * LANES) * LANES, silu(gate[t]) * v);
        }
      });
    }
    const bool two = model.halves == 2 && number == model.layers - 1;
    if (two) {
      const Range some = share(tokens, member, team->members());
      std::memcpy(regress.data() + (size_t)some.from * model.hidden, hidden.data() + (size_t)some.from * model.hidden,
                  (size_t)4 * model.hidden * (some.to - some.from));
    }
    meeting->wait();
    if (two) {
      Input in = ready(member, l.down, inner.data(), tokens, nullptr);
      product(member, l.down, in, tokens, 1, [&](int t, int r, F v) {
        const bool second = r >= model.hidden;
        float* to = (second ? regress : hidden).data() + (size_t)t * model.hidden + r - second * model.hidden;
        store(to, load(to) + v);
      });
    } else {
      add(member, l.down, inner, tokens);
    }
    meeting->wait();
  }

  void chunk(int member, const Call& c, int first, int tokens, int& done) {
    const int H = model.hidden, kinds = c.num_signals + c.last_hidden;
    Range some = share(tokens, member, team->members());
    if (model.fusion.fc.data) fuse(member, first, tokens);
    else {
      for (int t = some.from; t < some.to; ++t)
        read_row(model.embedding, batch.token[first + t], hidden.data() + (size_t)t * H);
      meeting->wait();
    }
    const float* goes_on = (model.halves == 2 ? regress : hidden).data();
    for (int number = 0; number < model.layers; ++number) {
      layer_forward(member, c, number, first, tokens);
      for (int s = 0; s < c.num_signals; ++s)
        if (c.signal_at[s] == number)
          for (int t = some.from; t < some.to; ++t)
            std::memcpy(c.signal + ((size_t)batch.place[first + t] * kinds + s) * H, hidden.data() + (size_t)t * H, 4 * H);
    }
    if (c.last_hidden)
      for (int t = some.from; t < some.to; ++t) {
        float* to = c.signal + ((size_t)batch.place[first + t] * kinds + c.num_signals) * H;
        const bool norm = model.norm_out && !model.fusion.fc.data;  // a drafter's states go on as they are
        if (norm) normalise(goes_on + (size_t)t * H, model.norm_out, eps, H, to);
        else std::memcpy(to, goes_on + (size_t)t * H, 4 * H);
      }
    int upto = done;
    while (upto < (int)batch.logit_at.size() && batch.logit_at[upto] < first + tokens) ++upto;
    const int wanted = upto - done;
    if (wanted) {
      meeting->wait();  // before rows are moved
      if (member == 0)
        for (int i = 0; i < wanted; ++i) {  // never forward: in place
          const size_t from = (size_t)(batch.logit_at[done + i] - first) * H;
          if (!state.empty()) std::memcpy(state.data() + (size_t)(done + i) * H, goes_on + from, 4 * H);
          std::memmove(hidden.data() + (size_t)i * H, hidden.data() + from, 4 * H);
        }
      meeting->wait();
      Input in = ready(member, model.head, hidden.data(), wanted, model.norm_out);
      const size_t padded = (size_t)model.head.panels() * LANES;
      product(member, model.head, in, wanted, 1, [&](int t, int r, F v) { store(batch.logits + batch.logit_to[done + t] * padded + r, v); });
    }
    meeting->wait();
    done = upto;
  }

  void all_chunks(int member, const Call& call) {
    int done = 0;
    for (int first = 0; first < batch.tokens; first += CHUNK)
      chunk(member, call, first, std::min(CHUNK, batch.tokens - first), done);
  }

  void run(const Call& call) {
    team->run([&](int member) { all_chunks(member, call); });
  }

  // False: a token is none of the model's.
  bool forward(const Call& call) {
    Crew& crew = Crew::here();
    std::lock_guard<std::mutex> guard(crew.busy);
    if (!batch.lay_out(call, model.embedding.rows)) return false;
    gather(crew, call.threads);
    state.clear();
    run(call);
    return true;
  }

  // Looks for the most probable token among those whose scores this member has computed, in each row, while
  // they are near: `head` and `places.added` are shared out alike. `choose` reads it behind a meeting. Draws
  // need all scores.
  template <class Scores>
  void look(int member, const Chain& chain, int rows, Scores scores) {
    if (chain.uniform) return;
    const Range panels = share(model.head.panels(), member, team->members());
    std::vector<Top>& top = own[member].top;
    top.assign(rows, Top());
    for (int i = 0; i < rows; ++i)
      top[i].look(scores(i), panels.from * LANES, std::min(panels.to * LANES, chain.vocab));
  }

  // The token that a row's chain goes on with, by the scores of the head, which a draw turns into its law.
  int64_t choose(int member, const Chain& chain, int number, int row, int step, float* score, double& sure) {
    const size_t at = (size_t)row * chain.steps + step;
    int64_t place = 0;
    double probable = 1;
    if (chain.uniform) {
      Mass& mass = own[member].mass;
      const bool known = mass.of_scores(score, chain.vocab, chain.temperature);
      place = mass.place(chain.uniform[at]);
      probable = mass.weight[place] / mass.total;
      const F by = all(known ? (float)(1 / mass.total) : NAN);
      for (int i = 0; i < chain.vocab; i += LANES) store(score + i, load(mass.weight.data() + i) * by);
    } else {
      Top best;
      for (int other = 0; other < team->members(); ++other) {  // of equals the first
        const Top& one = own[other].top[number];
        if (one.score > best.score) best = one;
      }
      place = best.place;
      if (chain.confidence > 0) probable = probability(score, chain.vocab, chain.temperature, place);
    }
    const int64_t token = chain.token_of ? chain.token_of[place] : place;
    chain.chosen[at] = token;
    if (chain.confidence > 0) {
      sure *= probable;
      if (sure < chain.confidence) chain.count[row] = std::min(chain.count[row], (int64_t)step + 1);
    }
    return token;
  }

  //   step       0                     1                  2
  //   fed        the call's tokens     that of step 0     that of step 1
  //   sees       what they see         committed, itself  committed, that of step 1, itself
  bool chain(const Call& call, const Chain& chain) {
    Crew& crew = Crew::here();
    std::lock_guard<std::mutex> guard(crew.busy);
    if (!batch.lay_out(call, model.embedding.rows)) return false;
    gather(crew, call.threads);
    const std::vector<int32_t> row = batch.logit_to;  // those that are drafted for
    const int rows = (int)row.size(), again = chain.steps - 1, H = model.hidden;
    const size_t padded = (size_t)model.head.panels() * LANES;
    if (!chain.uniform) found.resize(call.rows * padded);
    state.resize(model.fusion.fc.data ? (size_t)rows * H : 0);
    Lines<float> feature(state.size());
    std::vector<double> sure(rows, 1.0);
    for (int b = 0; b < call.rows; ++b)
      if (std::find(row.begin(), row.end(), b) == row.end()) chain.count[b] = 0;  // fed nothing
    batch.longest += again;
    auto committed = [&](int b) { return call.committed[b] + call.count[b]; };
    for (int step = 0; rows; ++step) {
      batch.logits = chain.uniform ? chain.scores + (size_t)step * call.rows * padded : found.data();
      auto scores = [&](int i) { return batch.logits + row[i] * padded; };
      std::vector<int64_t> token(rows);
      team->run([&](int member) {
        all_chunks(member, call);
        look(member, chain, rows, scores);
        meeting->wait();
        const Range some = share(rows, member, team->members());
        for (int i = some.from; i < some.to; ++i)
          token[i] = choose(member, chain, i, row[i], step, scores(i), sure[i]);
      });
      batch.token = token;
      if (std::all_of(row.begin(), row.end(), [&](int b) { return chain.count[b] <= step + 1; })) break;
      feature = state;
      batch.feature = feature.data(), batch.feature_width = H;
      batch.tokens = rows;
      for (auto* one : {&batch.position, &batch.slot, &batch.committed, &batch.place, &batch.logit_at}) one->resize(rows);
      batch.row = batch.logit_to = row;
      batch.seen.clear();
      batch.seen_from.assign(1, 0);
      for (int i = 0; i < rows; ++i) {
        const int64_t behind = committed(row[i]);
        batch.position[i] = (int32_t)std::min(behind + step, call.last);
        batch.slot[i] = (int32_t)behind + step;
        batch.committed[i] = (int32_t)behind;
        batch.place[i] = batch.logit_at[i] = i;
        for (int k = 0; k <= step; ++k) batch.seen.push_back((int32_t)behind + k);
        batch.seen_from.push_back((int32_t)batch.seen.size());
      }
    }
    return true;
  }

  // ----------------------------------------------------------------------- blocks of places

  // Keys and values of pairs, and to `state` those that logits are wanted behind: the last of each row.
  void keep_pairs(int member, const Call& c, int first, int tokens) {
    const int H = model.hidden, queries = model.heads * model.width / LANES;
    fuse(member, first, tokens);
    if (member == 0)
      for (size_t i = 0; i < batch.logit_at.size(); ++i) {
        const int t = batch.logit_at[i] - first;
        if (t >= 0 && t < tokens) std::memcpy(state.data() + i * H, hidden.data() + (size_t)t * H, 4 * H);
      }
    const Input in = ready(member, layers[0].qkv, hidden.data(), tokens, model.fusion.norm);
    for (int number = 0; number < model.layers; ++number) {
      const Matrix& m = layers[number].qkv;
      const int row = m.panels() * LANES;
      const Range some = share(m.panels() - queries, member, team->members());
      multiply(m, in, queries + some.from, queries + some.to, tokens,
               [&](int t, int r, F v) { store(qkv.data() + (size_t)t * row + r, v); });
      meeting->wait();
      turn(member, c, number, first, tokens, model.heads);
      meeting->wait();
    }
  }

  // Logits of the first `wanted` places of whole blocks.
  void read_places(int member, const Call& c, int first, int tokens, int wanted) {
    const Places& p = model.places;
    const int H = model.hidden, blocks = tokens / p.count;
    const Range some = share(tokens, member, team->members());
    for (int t = some.from; t < some.to; ++t) {
      const float* last = state.data() + (size_t)((first + t) / p.count) * H;
      const float* mask = p.masks + (size_t)(t % p.count) * H;
      for (int d = 0; d < H; d += LANES) store(hidden.data() + (size_t)t * H + d, load(last + d) + load(mask + d));
    }
    meeting->wait();
    for (int number = 0; number < model.layers; ++number) layer_forward(member, c, number, first, tokens);
    if (member == 0)
      for (int i = 0; i < blocks; ++i)  // never forward: in place
        std::memmove(hidden.data() + (size_t)i * wanted * H, hidden.data() + (size_t)i * p.count * H,
                     (size_t)4 * wanted * H);
    meeting->wait();
    Input in = ready(member, p.out, hidden.data(), blocks * wanted, model.norm_out);
    product(member, p.out, in, blocks * wanted, 1,
            [&](int t, int r, F v) { store(pair.data() + (size_t)t * H + r, v); });
    meeting->wait();
    in = ready(member, model.head, pair.data(), blocks * wanted, nullptr);
    const size_t padded = (size_t)model.head.panels() * LANES;
    product(member, model.head, in, blocks * wanted, 1, [&](int t, int r, F v) {
      const size_t row = batch.row[first + t / wanted * p.count];
      store(batch.logits + (row * p.count + t % wanted) * padded + r, v);
    });
    meeting->wait();
  }

  // What the tokens before add to logits: `write(token, first row, F)`. Threads do not meet at its end.
  template <class Write>
  void add_before(int member, const int64_t* token, int tokens, Write write) {
    const Places& p = model.places;
    const Range some = share(tokens, member, team->members());
    for (int t = some.from; t < some.to; ++t)
      read_row(model.embedding, token[t], pair.data() + (size_t)t * model.hidden);
    meeting->wait();
    Input in = ready(member, p.before, pair.data(), tokens, nullptr);
    product(member, p.before, in, tokens, 1,
            [&](int t, int r, F v) { store(low.data() + (size_t)t * p.added.cols + r, v); });
    meeting->wait();
    in = ready(member, p.added, low.data(), tokens, nullptr);
    product(member, p.added, in, tokens, 1, write);
  }

  // False: a token is none of the model's.
  bool added(const int64_t* token, int tokens, int threads, float* out) {
    Crew& crew = Crew::here();
    std::lock_guard<std::mutex> guard(crew.busy);
    if (std::any_of(token, token + tokens, [&](int64_t t) { return t < 0 || t >= model.embedding.rows; })) return false;
    gather(crew, threads);
    const size_t padded = (size_t)model.head.panels() * LANES;
    team->run([&](int member) {
      for (int first = 0; first < tokens; first += CHUNK)
        add_before(member, token + first, std::min(CHUNK, tokens - first),
                   [&](int t, int r, F v) { store(out + (first + t) * padded + r, v); });
    });
    return true;
  }

  // Reads the places of a block behind the last pair of each of these rows.
  void read_blocks(const Call& call, const Chain& chain, const std::vector<int32_t>& row) {
    const int rows = (int)row.size(), count = model.places.count;
    for (auto* one : {&batch.position, &batch.slot, &batch.committed, &batch.row, &batch.seen}) one->clear();
    batch.seen_from.assign(1, 0);
    batch.tokens = rows * count;
    batch.longest = count;
    for (int b : row) {
      const int64_t behind = call.committed[b] + call.count[b];
      batch.longest = std::max(batch.longest, (int)behind + count);
      for (int n = 0; n < count; ++n) {
        batch.position.push_back((int32_t)std::min(behind + n, call.last));
        batch.slot.push_back((int32_t)behind + n);
        batch.committed.push_back((int32_t)behind);
        batch.row.push_back(b);
        for (int k = 0; k < count; ++k) batch.seen.push_back((int32_t)behind + k);
        batch.seen_from.push_back((int32_t)batch.seen.size());
      }
    }
    const int whole = CHUNK / count * count;  // places of a block pass a layer together
    team->run([&](int member) {
      for (int first = 0; first < batch.tokens; first += whole)
        read_places(member, call, first, std::min(whole, batch.tokens - first), chain.steps ? chain.steps : count);
    });
  }

  // Keeps the call's pairs; with `chain` drafts a block behind the last of each row that has one, whose
  // logits are [rows, places, padded]; with steps of it adds what the tokens before say, and chooses. In a
  // model without `places` the call ends with them: a row's last pair, and unknown tokens behind it.
  bool block(const Call& call, const Chain* chain) {
    Crew& crew = Crew::here();
    std::lock_guard<std::mutex> guard(crew.busy);
    const bool own_places = model.places.count;
    if (!batch.lay_out(call, model.embedding.rows, model.fusion.unknown)) return false;
    gather(crew, call.threads);
    std::vector<int32_t> row;  // those that have a pair
    std::vector<int64_t> before;
    for (size_t i = 0; i < batch.logit_at.size(); ++i)
      if (batch.logit_to[i] % call.keep == 0) {
        row.push_back(batch.logit_to[i] / call.keep);
        before.push_back(batch.token[batch.logit_at[i]]);
      }
    const int rows = (int)row.size(), count = own_places ? model.places.count : call.keep;
    state.resize(own_places ? (size_t)rows * model.hidden : 0);
    if (own_places)
      team->run([&](int member) {
        for (int first = 0; first < batch.tokens; first += CHUNK)
          keep_pairs(member, call, first, std::min(CHUNK, batch.tokens - first));
      });
    else run(call);
    if (!chain) return true;
    if (own_places) read_blocks(call, *chain, row);
    for (int b = 0; chain->steps && b < call.rows; ++b)
      if (std::find(row.begin(), row.end(), b) == row.end()) chain->count[b] = 0;  // fed nothing
    const size_t padded = (size_t)model.head.panels() * LANES;
    std::vector<double> sure(rows, 1.0);
    auto scores = [&](int i, int step) { return batch.logits + ((size_t)row[i] * count + step) * padded; };
    for (int step = 0; rows && step < chain->steps; ++step) {
      team->run([&](int member) {
        auto own_scores = [&](int i) { return scores(i, step); };
        for (int first = 0; model.places.before.data && first < rows; first += CHUNK)
          add_before(member, before.data() + first, std::min(CHUNK, rows - first), [&](int t, int r, F v) {
            float* to = own_scores(first + t) + r;
            store(to, load(to) + v);
          });
        look(member, *chain, rows, own_scores);
        meeting->wait();  // `before` was read, and each has looked
        const Range some = share(rows, member, team->members());
        for (int i = some.from; i < some.to; ++i)
          before[i] = choose(member, *chain, i, row[i], step, own_scores(i), sure[i]);
      });
      if (std::all_of(row.begin(), row.end(), [&](int b) { return chain->count[b] <= step + 1; })) break;
    }
    return true;
  }
};

// ------------------------------------------------------------------------- heads without a layer

// Medusa's (drafters/medusa.py): each reads a state f of the target by itself.
//
//   x = f,  then x + silu(block x) for each block;  logits = last x
//
// Panels of all heads are shared out together: one pass over the weights, however many heads.
struct Heads : Products {
  static constexpr int TOGETHER = 16;  // rows that pass the weights together

  const int count, blocks, hidden;
  const std::vector<Matrix> matrices;  // [blocks + 1, count], the last ones to logits
  Lines<float> state, next;            // [count, rows, hidden]

  Heads(const Matrix* given, int count, int blocks)
      : Products(0, count * TOGETHER, given->cols), count(count), blocks(blocks), hidden(given->cols),
        matrices(given, given + count * (blocks + 1)) {
    state.resize((size_t)count * TOGETHER * hidden);
    next.resize(state.size());
  }

  // `write(head, row, first number, F)` for the products of one stage: of `x` [count, rows, hidden],
  // or with `alike` of one [rows, hidden] for all heads.
  template <class Write>
  void stage(int member, int number, const float* x, bool alike, int rows, Write write) {
    const Matrix* some = matrices.data() + number * count;
    const Input all = ready(member, some[0], x, alike ? rows : count * rows, nullptr);
    const int panels = some[0].panels();
    const Range mine = share(count * panels, member, team->members());
    for (int k = mine.from / panels; k * panels < mine.to; ++k)
      multiply(some[k], alike ? all : all.behind(k * rows), std::max(mine.from - k * panels, 0),
               std::min(mine.to - k * panels, panels), rows, [&](int t, int r, F v) { write(k, t, r, v); });
  }

  // `features` [rows, hidden] -> `logits` [rows, count, padded].
  void forward(const float* features, int all, int threads, float* logits) {
    Crew& crew = Crew::here();
    std::lock_guard<std::mutex> guard(crew.busy);
    gather(crew, threads);
    const size_t padded = (size_t)matrices.back().panels() * LANES;
    for (int first = 0; first < all; first += TOGETHER) {
      const int rows = std::min(TOGETHER, all - first);
      const float* f = features + (size_t)first * hidden;
      team->run([&](int member) {
        const float* x = f;
        for (int number = 0; number < blocks; ++number) {
          float* to = (number % 2 ? next : state).data();
          stage(member, number, x, number == 0, rows, [&](int k, int t, int r, F v) {
            const size_t at = ((size_t)k * rows + t) * hidden + r;
            store(to + at, load(x + (number ? at : (size_t)t * hidden + r)) + silu(v));
          });
          meeting->wait();
          x = to;
        }
        stage(member, blocks, x, blocks == 0, rows, [&](int k, int t, int r, F v) {
          store(logits + ((size_t)(first + t) * count + k) * padded + r, v);
        });
      });
    }
  }
};

extern "C" {
const char* ds_isa() { return tiles_allowed() ? DS_ISA ", amx" : DS_ISA; }
int ds_lanes() { return LANES; }
Engine* ds_open(const Model* model) { return new Engine(*model); }
void ds_close(Engine* engine) { delete engine; }
// 0: a token is none of the model's, and nothing was computed.
int ds_forward(Engine* engine, const Call* call) { return engine->forward(*call); }
int ds_chain(Engine* engine, const Call* call, const Chain* chain) { return engine->chain(*call, *chain); }
int ds_block(Engine* engine, const Call* call, const Chain* chain) { return engine->block(*call, chain); }
int ds_added(Engine* engine, const int64_t* token, int tokens, int threads, float* out) {
  return engine->added(token, tokens, threads, out);
}

Heads* ds_open_heads(const Matrix* matrices, int count, int blocks) { return new Heads(matrices, count, blocks); }
void ds_close_heads(Heads* heads) { delete heads; }
void ds_heads(Heads* heads, const float* features, int rows, int threads, float* logits) {
  heads->forward(features, rows, threads, logits);
}

// The token left of which a share u of softmax(logits / temperature) lies; -1: there is no such law.
int64_t ds_draw(const float* logits, int vocab, double temperature, double u) {
  thread_local Mass mass;
  return mass.of_scores(logits, vocab, temperature) ? mass.place(u) : -1;
}

// q [count], of these ids or of all (null), at a token. Laws are filled up with id 0 at probability 0.
static float probability_in(const float* q, const int64_t* ids, int count, int64_t token) {
  if (!ids) return q[token];
  constexpr int AT_ONCE = 64;  // a step without a branch takes many
  float own = 0.0f;
  for (int first = 0; first < count; first += AT_ONCE) {
    const int end = std::min(first + AT_ONCE, count);
    int64_t here = 0;
    for (int i = first; i < end; ++i) here |= ids[i] == token;
    for (int i = first; here && i < end; ++i)
      if (ids[i] == token) own += q[i];
  }
  return own;
}

// Rejection of one token that was drawn from q, see `probability_in`. -1: it stays, where u[0] is below
// p / q; else the token that u[1] draws from what is left of p; -2: there is no such law.
int64_t ds_reject(const float* logits, int vocab, double temperature, int64_t token, const float* q,
                  const int64_t* ids, int count, const double* u) {
  thread_local Mass mass;
  if (!mass.of_scores(logits, vocab, temperature)) return -2;
  const float own = probability_in(q, ids, count, token);
  if (u[0] < (float)(mass.weight[token] / mass.total) / own) return -1;
  if (!mass.take_away(q, ids, count)) mass.of_scores(logits, vocab, temperature);
  return mass.place(u[1]);
}

// Block verification (core/block_rule.py) of a chain of `length` tokens, each drawn from q[i] behind the
// tokens before it; logits[i] are the target's there, logits[length] those behind the whole chain.
//
//     down   share[i] of the target's law stands behind i tokens; one softmax a token, none behind a
//            token that the target never says
//     up     the first i with u[i - 1] below its chance stays, and next[i] draws the token behind it
//
// -> how many stay, and that token; -1: there is no such law.
int64_t ds_judge_chain(const float* const* logits, int vocab, double temperature, int length, const int64_t* token,
                       const float* const* q, const int64_t* const* ids, const int* count, const double* u,
                       const double* next, int64_t* drawn) {
  thread_local std::vector<Mass> law;
  thread_local std::vector<double> share;
  if ((int)law.size() <= length) law.resize(length + 1);
  share.assign(1, 1.0);
  for (int i = 0; i < length; ++i) {
    if (!law[i].of_scores(logits[i], vocab, temperature)) return -1;
    const double p = (float)(law[i].weight[token[i]] / law[i].total);
    // 0 / 0, of a token that neither law has, is 0: `min` gives its first argument then
    const double left = std::min(share[i] * (p / probability_in(q[i], ids[i], count[i], token[i])), 1.0);
    if (!(left > 1e-30)) break;  // below all numbers that are drawn but 0
    share.push_back(left);
  }
  for (int i = (int)share.size() - 1;; --i) {
    Mass& own = law[i];
    if (i > 0) {
      double chance = share[i];
      if (i < length) {
        const double rest = std::max(share[i] - own.overlap(share[i], q[i], ids[i], count[i]), 0.0);
        const double all = rest + 1 - share[i];
        chance = all > 0 ? rest / all : 1.0;
      }
      if (!(u[i - 1] < chance)) continue;
    }
    const bool known = i < length && own.take_away(q[i], ids[i], count[i], 1 / share[i]);
    if (!known && !own.of_scores(logits[i], vocab, temperature)) return -1;
    *drawn = own.place(next[i]);
    return i;
  }
}

void* ds_allocate(size_t bytes) {
  const size_t page = 1 << 21, whole = (bytes + page - 1) / page * page;
  void* p = std::aligned_alloc(page, whole);
#if defined(__linux__)
  if (p) madvise(p, whole, MADV_HUGEPAGE);  // a forward reads all weights: fewer pages to look up
#endif
  return p;
}
void ds_free(void* p) { std::free(p); }

void ds_row(const Matrix* m, int64_t row, float* out) { read_row(*m, row, out); }

// One matrix by itself: `out` is [tokens, padded rows].
void ds_multiply(const Matrix* m, const float* x, int tokens, float* out) {
  const int n = m->cols, groups = m->groups();
  const size_t padded = (size_t)m->panels() * LANES;
  Lines<int8_t> q(m->whole() ? (size_t)tokens * n : 0);
  Lines<float> scale((size_t)tokens * groups), total((size_t)tokens * groups);
  for (int t = 0; t < tokens && m->whole(); ++t)
    quantise(*m, x + (size_t)t * n, tokens, q.data() + (size_t)t * n, scale.data() + t, total.data() + t);
  Input in{x, q.data(), scale.data(), total.data(), n, tokens};
  multiply(*m, in, 0, m->panels(), tokens, [&](int t, int r, F v) { store(out + t * padded + r, v); });
}
}
