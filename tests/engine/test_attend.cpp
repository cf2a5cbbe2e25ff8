// Attention over a cache: against doubles, and the same bits for any number of threads, rows in a batch, or way to get
// there. More than one span of keys, so that decode steps are split.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "blocks/attend.h"
#include "check.h"
#include "random_floats.h"

using namespace smoe;

namespace {

struct Shape {
  size_t heads, kv_heads, dim, value_dim;
  KvType type;
  size_t window, positions;
  bool shared = false;  // one row is key and value
};

// A cache of `positions` rows, filled.
struct Cache {
  std::vector<uint8_t> keys, values;
  KvLayer layer;

  Cache(const Compute& c, const Shape& s, uint32_t seed) {
    const size_t capacity = (s.positions + kKeyTile - 1) / kKeyTile * kKeyTile, row = kv_row_bytes(s.type, s.dim);
    keys.resize(s.kv_heads * capacity * row);
    values.resize(keys.size());
    layer = {keys.data(), s.shared ? keys.data() : values.data(), capacity, s.dim, s.window, 0, s.type};
    for (size_t h = 0; h < s.kv_heads; ++h) {
      for (size_t p = 0; p < s.positions; ++p) {
        const auto place = static_cast<uint32_t>(2 * (h * s.positions + p));
        store_row(c, layer, random_floats(s.dim, seed + place).data(), layer.key(h, p));
        if (!s.shared) store_row(c, layer, random_floats(s.dim, seed + place + 1).data(), layer.value(h, p));
      }
    }
  }
};

// Queries [rows, heads, dim] of the last positions of every sequence, each of `rows` rows.
std::vector<float> run(const Kernels* kernels, uint32_t threads, const Shape& s, const std::vector<const KvLayer*>& kvs,
                       const std::vector<float>& q, size_t rows, size_t last, const float* sinks = nullptr) {
  ThreadPool pool(threads);
  const Compute c{kernels, &pool, false, nullptr};
  const size_t group = s.heads / s.kv_heads, all = rows * kvs.size();
  Workspace ws;
  ws.attn_worker_floats = attend_worker_floats(s.dim, group);
  std::vector<float> worker(threads * ws.attn_worker_floats), spans(attend_span_floats(s.dim, group, threads));
  ws.attn_worker = worker.data(), ws.attn_spans = spans.data();
  std::vector<SequenceRows> batch;
  for (size_t i = 0; i < kvs.size(); ++i) batch.push_back({i * rows, rows, last + 1 - rows, kvs[i], {}});
  std::vector<float> out(all * s.heads * s.value_dim);
  Queries queries{batch,
                  0,
                  all,
                  s.heads,
                  s.kv_heads,
                  s.value_dim,
                  1.0f / std::sqrt(float(s.dim)),
                  q.data(),
                  out.data(),
                  s.heads * s.value_dim,
                  s.value_dim,
                  sinks};
  attend(c, queries, ws);
  return out;
}

std::vector<double> truth(const Compute& c, const Shape& s, const KvLayer& kv, const float* q, size_t position,
                          const float* sinks) {
  std::vector<double> out(s.heads * s.value_dim, 0.0);
  std::vector<float> row(s.dim);
  const auto read = [&](const uint8_t* from) {
    if (kv.type == KvType::q8) c.kernels->kv8_to_f32_row(from, s.dim, row.data());
    if (kv.type == KvType::f16) c.kernels->f16_to_f32_row(reinterpret_cast<const uint16_t*>(from), s.dim, row.data());
    if (kv.type == KvType::f32) std::copy_n(reinterpret_cast<const float*>(from), s.dim, row.data());
  };
  for (size_t h = 0; h < s.heads; ++h) {
    const size_t kv_head = h / (s.heads / s.kv_heads);
    std::vector<double> p(position + 1, 0.0);
    double top = sinks == nullptr ? -INFINITY : sinks[h], sum = 0;
    for (size_t i = kv.oldest(position); i <= position; ++i) {
      read(kv.key(kv_head, i));
      for (size_t d = 0; d < s.dim; ++d) p[i] += static_cast<double>(q[h * s.dim + d]) * row[d];
      p[i] /= std::sqrt(static_cast<double>(s.dim));
      top = std::max(top, p[i]);
    }
    if (sinks != nullptr) sum = std::exp(sinks[h] - top);
    for (size_t i = kv.oldest(position); i <= position; ++i) sum += p[i] = std::exp(p[i] - top);
    for (size_t i = kv.oldest(position); i <= position; ++i) {
      read(kv.value(kv_head, i));
      for (size_t d = 0; d < s.value_dim; ++d) out[h * s.value_dim + d] += p[i] / sum * row[d];
    }
  }
  return out;
}

const Shape kShapes[] = {
    {8, 1, 64, 64, KvType::f16, 5000, 2500},         // one slice, three spans
    {12, 2, 32, 32, KvType::q8, 5000, 2100},         // groups of six
    {3, 3, 48, 48, KvType::f32, 5000, 1500},         // a head each
    {8, 2, 64, 64, KvType::f16, 1100, 2200},         // a window that reaches into a second span
    {20, 1, 96, 64, KvType::f16, 5000, 2050, true},  // a latent: two slices of one row
    {4, 2, 64, 64, KvType::q8, 5000, 700},           // one span
};

}  // namespace

TEST(attend_decode_against_double_for_any_number_of_threads) {
  ThreadPool pool(1);
  for (const Shape& s : kShapes) {
    const Kernels* best = choose_kernels("auto").value();
    const Compute c{best, &pool, false, nullptr};
    const Cache cache(c, s, 1);
    const size_t last = s.positions - 1;
    const auto q = random_floats(s.heads * s.dim, 2), sinks = random_floats(s.heads, 3);
    for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
      const auto expected = truth(c, s, cache.layer, q.data(), last, sink);
      const auto one = run(best, 1, s, {&cache.layer}, q, 1, last, sink);
      for (size_t i = 0; i < one.size(); ++i) CHECK(std::fabs(one[i] - expected[i]) < 2e-6);
      for (const uint32_t threads : {2u, 3u, 8u}) CHECK(run(best, threads, s, {&cache.layer}, q, 1, last, sink) == one);
      const auto scalar = run(choose_kernels("scalar").value(), 2, s, {&cache.layer}, q, 1, last, sink);
      for (size_t i = 0; i < one.size(); ++i) CHECK(std::fabs(scalar[i] - expected[i]) < 5e-6);
    }
  }
}

TEST(attend_a_row_of_a_prompt_or_of_a_batch_is_as_alone) {
  ThreadPool pool(1);
  const Kernels* best = choose_kernels("auto").value();
  const Compute c{best, &pool, false, nullptr};
  for (const Shape& s : kShapes) {
    const size_t rows = 37, width = s.heads * s.dim, out_width = s.heads * s.value_dim, last = s.positions - 1;
    const Cache first(c, s, 1), second(c, s, 100000);
    const auto q = random_floats(2 * rows * width, 4);
    const auto prompts = run(best, 2, s, {&first.layer, &second.layer}, q, rows, last);
    for (const size_t row : {size_t{0}, size_t{20}, rows - 1}) {
      for (const size_t sequence : {size_t{0}, size_t{1}}) {
        const float* at = q.data() + (sequence * rows + row) * width;
        const KvLayer& kv = sequence == 0 ? first.layer : second.layer;
        const auto alone = run(best, 2, s, {&kv}, {at, at + width}, 1, last + 1 - rows + row);
        CHECK(std::equal(alone.begin(), alone.end(),
                         prompts.begin() + static_cast<ptrdiff_t>((sequence * rows + row) * out_width)));
      }
    }
    std::vector<float> two(q.begin(), q.begin() + static_cast<ptrdiff_t>(2 * width));
    const auto both = run(best, 4, s, {&first.layer, &second.layer}, two, 1, last);
    for (const size_t i : {size_t{0}, size_t{1}}) {
      const auto begin = q.begin() + static_cast<ptrdiff_t>(i * width);
      const auto alone = run(best, 1, s, {i == 0 ? &first.layer : &second.layer},
                             {begin, begin + static_cast<ptrdiff_t>(width)}, 1, last);
      CHECK(std::equal(alone.begin(), alone.end(), both.begin() + static_cast<ptrdiff_t>(i * out_width)));
    }
  }
}
