// From logits to token ids: one pass over the vocabulary. Sorts only tokens that can pass top-k and top-p.
#include "simd.h"
#include "threads.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// The columns of SamplingRows (reference/sampling.py), in its order; `qwen_sample_reads` checks that they agree.
#define COLUMNS(COLUMN)               \
    COLUMN(float, temperature)        \
    COLUMN(int32_t, top_k)            \
    COLUMN(float, top_p)              \
    COLUMN(float, min_p)              \
    COLUMN(float, typical_p)          \
    COLUMN(float, top_n_sigma)        \
    COLUMN(float, repetition_penalty) \
    COLUMN(float, presence_penalty)   \
    COLUMN(float, frequency_penalty)  \
    COLUMN(int64_t, seeds)            \
    COLUMN(int64_t, steps)            \
    COLUMN(int64_t, slots)
#define AS_POINTER(type, name) const type *name;
#define AS_TEXT(type, name) #type " " #name "\n"

struct Sampling {
    const void *logits;
    const uint8_t *in_text, *in_reply, *banned;
    long logits_stride, text_stride, reply_stride, banned_stride, vocab;
    COLUMNS(AS_POINTER)
    int64_t *out;
};

struct Candidate {
    float score;
    int32_t id;
};

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
// Scores computed at a time, with one check whether any of them matters.
constexpr long SOME = 256;

INLINE vi flags(const uint8_t *p) { return __builtin_convertvector(*reinterpret_cast<const vb *>(p), vi) != 0; }

INLINE vf counts(const uint8_t *p) {
    return to_float(__builtin_convertvector(*reinterpret_cast<const vb *>(p), vi) & splat_int(255));
}

// One row's logits and their penalties.
template <class T>
struct Row {
    const T *logits;
    const uint8_t *in_text, *in_reply, *banned;
    float repetition, presence, frequency, temperature;

    vf score(long i) const {
        vf x = load(logits + i);
        if (repetition != 1.0f) x = flags(in_text + i) ? (x < 0.0f ? x * repetition : x / repetition) : x;
        if (presence != 0.0f) x = flags(in_reply + i) ? x - presence : x;
        if (frequency != 0.0f) x -= frequency * counts(in_reply + i);
        return (flags(banned + i) ? splat(LOWEST) : x) / temperature;
    }

    // Computes scores [first, first + n) and their largest. The last vector overlaps the one before.
    float scores(long first, long n, float *to) const {
        if (n < LANES) return few_scores(first, n, to);
        vf largest = splat(LOWEST);
        for (long i = 0; i < n; i += LANES) {
            const long at = std::min(i, n - LANES);
            vf x = score(first + at);
            store(to + at, x);
            largest = max(x, largest);
        }
        return max_lane(largest);
    }

    float few_scores(long first, long n, float *to) const {
        T values[LANES] = {};
        uint8_t bits[3][LANES] = {};
        const uint8_t *sources[] = {in_text, in_reply, banned};
        memcpy(values, logits + first, n * sizeof(T));
        for (int i = 0; i < 3; i++) memcpy(bits[i], sources[i] + first, n);
        store(to, Row{values, bits[0], bits[1], bits[2], repetition, presence, frequency, temperature}.score(0));
        return *std::max_element(to, to + n);
    }
};

template <class T>
long greedy(const Row<T> &row, long vocab) {
    float some[SOME], best = LOWEST;
    long id = 0;
    for (long first = 0; first < vocab; first += SOME) {
        const long n = std::min(SOME, vocab - first);
        if (!(row.scores(first, n, some) > best)) continue;
        for (long i = 0; i < n; i++)
            if (some[i] > best) best = some[i], id = first + i;
    }
    return id;
}

// The lowest score within so many standard deviations of the highest. Ignores banned tokens.
template <class T>
float lowest_within(const Row<T> &row, long vocab, float num_sigmas) {
    float some[SOME], highest = LOWEST;
    double sum = 0, squares = 0;
    long count = 0;
    for (long first = 0; first < vocab; first += SOME) {
        const long n = std::min(SOME, vocab - first);
        highest = std::max(highest, row.scores(first, n, some));
        for (long i = 0; i < n; i++)
            if (some[i] > LOWEST) sum += some[i], squares += double(some[i]) * some[i], count++;
    }
    const double mean = sum / count, variance = std::max(squares / count - mean * mean, 0.0);
    return float(highest - double(num_sigmas) * std::sqrt(variance));
}

// Tokens with at least the score `threshold` and fewer than k higher tokens, in the order of ids. k = 0: no limit.
template <class T>
void collect(const Row<T> &row, long vocab, long k, float threshold, std::vector<Candidate> &found) {
    if (k >= vocab) k = 0;
    float some[SOME];
    unsigned long limit = 4 * k + SOME;
    std::vector<float> ordered;
    auto cut = [&] {
        if (!k || long(found.size()) <= k) return;
        ordered.clear();
        for (const Candidate &one : found) ordered.push_back(one.score);
        std::nth_element(ordered.begin(), ordered.begin() + k - 1, ordered.end(), std::greater<float>());
        threshold = ordered[k - 1];
        found.erase(std::remove_if(found.begin(), found.end(), [&](auto &one) { return one.score < threshold; }),
                    found.end());
        limit = 2 * found.size() + SOME;
    };
    found.clear();
    for (long first = 0; first < vocab; first += SOME) {
        const long n = std::min(SOME, vocab - first);
        if (!(row.scores(first, n, some) >= threshold)) continue;
        for (long i = 0; i < n; i++)
            if (some[i] >= threshold) found.push_back({some[i], int32_t(first + i)});
        if (k && found.size() > limit) cut();
    }
    cut();
}

float weight(float score, float highest) { return exp(splat(score - highest))[0]; }

int64_t mass(float weight) { return int64_t(weight * 1099511627776.0f); }

// The lowest value that passes if higher values must have less than this share of the mass. Sorts only what it needs.
template <class Value>
float lowest_passing(std::vector<Candidate> &found, float highest, float share, const Value &value) {
    const auto higher = [&](const Candidate &a, const Candidate &b) { return value(a) > value(b); };
    int64_t total = 0, above = 0;
    for (const Candidate &one : found) total += mass(weight(one.score, highest));
    const float bound = share * float(total);
    float lowest = std::numeric_limits<float>::infinity();
    auto begin = found.begin();
    for (long some = SOME; begin != found.end(); some *= 4) {
        auto end = found.end() - begin > some ? begin + some : found.end();
        if (end != found.end()) std::nth_element(begin, end, found.end(), higher);
        std::sort(begin, end, higher);
        for (; begin != end; ++begin) {
            if (!(float(above) < bound)) return lowest;
            lowest = value(*begin);
            above += mass(weight(begin->score, highest));
        }
    }
    return lowest;
}

// Keeps the locally typical tokens: those whose drop below the highest is nearest to the mean drop.
void keep_typical(std::vector<Candidate> &found, float highest, float typical_p) {
    int64_t total = 0, moment = 0;
    for (const Candidate &one : found) {
        const float share = weight(one.score, highest);
        total += mass(share);
        if (share > 0) moment += int64_t(share * 1099511627776.0f * (highest - one.score));
    }
    const float mean = float(moment) / float(total);
    const auto nearness = [=](const Candidate &one) { return -std::fabs(highest - one.score - mean); };
    const float lowest = lowest_passing(found, highest, typical_p, nearness);
    found.erase(std::remove_if(found.begin(), found.end(), [&](auto &one) { return nearness(one) < lowest; }),
                found.end());
}

// Philox4x32-10's first word for a counter of (token id, step) and the key (seed).
uint32_t random_bits(uint64_t seed, uint64_t step, uint32_t id) {
    uint32_t c0 = id, c1 = uint32_t(step), c2 = uint32_t(step >> 32), c3 = 0, k0 = uint32_t(seed),
             k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t first = uint64_t(c0) * 0xD2511F53u, second = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(second >> 32) ^ c1 ^ k0, c2 = uint32_t(first >> 32) ^ c3 ^ k1;
        c1 = uint32_t(second), c3 = uint32_t(first);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

float exponential(uint32_t bits) {
    const float uniform = (float(bits) + 0.5f) * 0x1p-32f;
    if (uniform < 0x1p-7f) return uniform * (1 + uniform * (0.5f + uniform * (1.0f / 3.0f)));
    return -std::log(1 - std::min(uniform, 1 - 0x1p-24f));
}

template <class T>
long draw(const Row<T> &row, const Sampling &s, long index) {
    static thread_local std::vector<Candidate> found;
    const float sigmas = s.top_n_sigma[index];
    const float threshold = sigmas > 0 ? lowest_within(row, s.vocab, sigmas) : std::numeric_limits<float>::lowest();
    collect(row, s.vocab, s.top_k[index], threshold, found);
    float highest = LOWEST, best = -1;
    for (const Candidate &one : found) highest = std::max(highest, one.score);
    const auto score = [](const Candidate &one) { return one.score; };
    const float lowest = s.top_p[index] < 1 ? lowest_passing(found, highest, s.top_p[index], score) : LOWEST;
    const auto is_dropped = [&](const Candidate &one) {
        return one.score < lowest || !(weight(one.score, highest) >= s.min_p[index]);
    };
    const bool is_typical = s.typical_p[index] < 1;
    if (is_typical) {
        found.erase(std::remove_if(found.begin(), found.end(), is_dropped), found.end());
        keep_typical(found, highest, s.typical_p[index]);
    }
    long id = 0;
    for (const Candidate &one : found) {
        const float share = weight(one.score, highest);
        if (!is_typical && (one.score < lowest || !(share >= s.min_p[index]))) continue;
        const float race = share / exponential(random_bits(s.seeds[index], s.steps[index], one.id));
        if (race > best || (race == best && one.id < id)) best = race, id = one.id;
    }
    return id;
}

template <class T>
void sample_row(const Sampling &s, long index) {
    const long slot = s.slots[index];
    const bool is_greedy = s.temperature[index] == 0 || s.top_k[index] == 1;
    const Row<T> row{static_cast<const T *>(s.logits) + index * s.logits_stride,
                     s.in_text + slot * s.text_stride,
                     s.in_reply + slot * s.reply_stride,
                     s.banned + index * s.banned_stride,
                     s.repetition_penalty[index],
                     s.presence_penalty[index],
                     s.frequency_penalty[index],
                     is_greedy ? 1.0f : s.temperature[index]};
    s.out[index] = is_greedy ? greedy(row, s.vocab) : draw(row, s, index);
}

}  // namespace

// Whether these are the columns of `Sampling`: one line each, with type and name.
extern "C" long qwen_sample_reads(const char *columns) { return !strcmp(columns, COLUMNS(AS_TEXT)); }

// Each row's next token id. Draws all rows before marking any token as seen.
extern "C" void qwen_sample(const Sampling *s, uint8_t *in_text, uint8_t *in_reply, long batch, long is_bf16,
                            long num_threads) {
    parallel(batch, batch * s->vocab < THREADS_ELEMENTS ? 1 : int(num_threads),
             [&](long row) { is_bf16 ? sample_row<bf16>(*s, row) : sample_row<float>(*s, row); });
    for (long row = 0; row < batch; row++) {
        in_text[s->slots[row] * s->text_stride + s->out[row]] = 1;
        uint8_t &count = in_reply[s->slots[row] * s->reply_stride + s->out[row]];
        if (count < 255) count++;
    }
}
