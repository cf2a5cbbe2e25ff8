// Every ISA this processor supports against scalar, and scalar against the definition in double precision.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "blocks.h"
#include "check.h"
#include "kernels/act.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "quant/codec.h"
#include "quant/quant.h"
#include "random_floats.h"

using namespace smoe;

namespace {

const std::vector<Encoding> kBlocks = block_encodings();
const std::vector<Encoding> kAll = all_encodings();

std::vector<const Kernels*> fast_kernels() {
  std::vector<const Kernels*> out;
  for (const Kernels* k : all_kernels()) {
    if (k->rank > 0 && k->supported()) out.push_back(k);
  }
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A stored matrix and its values.
struct Stored {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
  Matrix matrix;
};

Stored store_rows(Encoding e, const std::vector<uint8_t>& rows_layout, uint64_t rows, uint64_t cols, Layout layout) {
  Stored s;
  s.values.resize(rows * cols);
  decode_rows(e, rows_layout.data(), rows * cols, s.values.data());
  if (encoding_info(e).plain) layout = Layout::rows;
  s.bytes.resize(stored_bytes(e, layout, rows, cols));
  if (layout == Layout::rows) {
    s.bytes = rows_layout;
  } else {
    pack_panels(e, rows_layout.data(), rows, cols, s.bytes.data());
  }
  s.matrix = {e, layout, rows, cols, s.bytes.data()};
  return s;
}

Stored random_matrix(Encoding e, uint64_t rows, uint64_t cols, uint32_t seed, Layout layout = Layout::panel16) {
  const auto x = random_floats(rows * cols, seed);
  std::vector<uint8_t> bytes(stored_bytes(e, Layout::rows, rows, cols));
  CHECK(encode_rows(e, x.data(), rows, cols, bytes.data()).is_ok());
  return store_rows(e, bytes, rows, cols, layout);
}

// Every level and sub-scale at an end of its range: 0xff, 0x00, 0x80 or 0x7f throughout, block scales 1.
Stored extreme_matrix(Encoding e, uint64_t rows, uint64_t cols, uint8_t fill) {
  const uint32_t block = encoding_info(e).block_bytes;
  std::vector<uint8_t> bytes(stored_bytes(e, Layout::rows, rows, cols), fill);
  for (size_t i = 0; i < bytes.size(); i += block) {
    put_block_scales(e, &bytes[i], 1.0f, 0.5f);
  }
  return store_rows(e, bytes, rows, cols, Layout::panel16);
}

std::vector<uint8_t> quantize(const Kernels& k, Encoding e, const std::vector<float>& x, size_t tokens, size_t cols) {
  std::vector<uint8_t> acts(tokens * act_row_bytes(act_format(e), cols), 0xcc);
  k.quantize_act(act_format(e), x.data(), tokens, cols, cols, acts.data());
  return acts;
}

std::vector<float> multiply(const Kernels& k, const Matrix& w, const std::vector<uint8_t>& acts, size_t tokens,
                            const uint32_t* index = nullptr) {
  std::vector<float> y(tokens * w.rows);
  k.matmul_q8(w, acts.data(), index, tokens, 0, w.rows, y.data(), w.rows);
  return y;
}

// Largest difference over largest reference.
double error_of(const std::vector<float>& y, const std::vector<double>& reference) {
  double difference = 0, largest = 1e-30;
  for (size_t i = 0; i < y.size(); ++i) {
    difference = std::max(difference, std::fabs(y[i] - reference[i]));
    largest = std::max(largest, std::fabs(reference[i]));
  }
  return difference / largest;
}

std::vector<double> exact_product(const std::vector<float>& w, const std::vector<float>& x, size_t rows, size_t cols,
                                  size_t tokens) {
  std::vector<double> y(tokens * rows, 0.0);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t r = 0; r < rows; ++r) {
      for (size_t k = 0; k < cols; ++k) y[t * rows + r] += static_cast<double>(w[r * cols + k]) * x[t * cols + k];
    }
  }
  return y;
}

// The values that quantised activations stand for.
std::vector<float> act_values(Encoding e, const std::vector<uint8_t>& acts, size_t tokens, size_t cols) {
  std::vector<float> x(tokens * cols);
  const size_t stride = act_row_bytes(act_format(e), cols);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t k = 0; k < cols; ++k) {
      const uint8_t* row = acts.data() + t * stride;
      if (act_format(e) == ActFormat::q8_32) {
        const auto& a = reinterpret_cast<const Act32*>(row)[k / 32];
        x[t * cols + k] = a.d * a.q[k % 32];
      } else {
        const auto& a = reinterpret_cast<const Act256*>(row)[k / 256];
        x[t * cols + k] = a.d * a.q[k % 256];
      }
    }
  }
  return x;
}

}  // namespace

TEST(kernels_registry) {
  const auto best = choose_kernels("auto"), scalar = choose_kernels("scalar"), unknown = choose_kernels("z80");
  REQUIRE(best.is_ok() && scalar.is_ok());
  CHECK_EQ(std::string(scalar.value()->name), "scalar");
  CHECK(unknown.status().code() == Code::usage);
  CHECK(unknown.status().hint().find("scalar") != std::string::npos);
  for (const Kernels* k : all_kernels()) {
    CHECK(!k->supported() || k->rank <= best.value()->rank);
    const auto named = choose_kernels(k->name);
    CHECK_EQ(named.is_ok(), k->supported());
    if (!named.is_ok()) CHECK(named.status().code() == Code::usage);
  }
  for (const Kernels* k : fast_kernels()) std::cerr << "kernels under test: " << k->name << "\n";
}

TEST(kernels_scalar_matmul_q8_is_the_product_of_what_is_stored) {
  const size_t rows = 19, cols = 512, tokens = 3;
  for (const Encoding e : kBlocks) {
    for (const Layout layout : {Layout::panel16, Layout::rows}) {
      const Stored w = random_matrix(e, rows, cols, 1, layout);
      const auto acts = quantize(scalar_kernels(), e, random_floats(tokens * cols, 2), tokens, cols);
      const auto y = multiply(scalar_kernels(), w.matrix, acts, tokens);
      CHECK(error_of(y, exact_product(w.values, act_values(e, acts, tokens, cols), rows, cols, tokens)) < 1e-6);
    }
  }
}

TEST(kernels_quantize_act_error_is_half_a_step) {
  const size_t cols = 1024;
  const auto x = random_floats(cols, 3);
  for (const Encoding e : kBlocks) {
    const auto back = act_values(e, quantize(scalar_kernels(), e, x, 1, cols), 1, cols);
    const size_t block = act_format(e) == ActFormat::q8_32 ? 32 : 256;
    for (size_t k = 0; k < cols; k += block) {
      float amax = 0;
      for (size_t i = k; i < k + block; ++i) amax = std::max(amax, std::fabs(x[i]));
      for (size_t i = k; i < k + block; ++i) CHECK(std::fabs(back[i] - x[i]) <= amax / 127 * 0.5001f);
    }
  }
}

TEST(kernels_quantize_act_same_bytes) {
  const size_t cols = 768;
  std::vector<std::vector<float>> inputs;
  for (const float scale : {1.0f, 1e-3f, 1e4f, 1e30f, 1e-38f, 1e-42f, 1e-44f, 0.0f}) {
    inputs.push_back(random_floats(cols, 4, scale));
  }
  std::vector<float> ties(cols);  // amax 127: d is 1 and every other value is exactly between two levels
  for (size_t i = 0; i < cols; ++i) ties[i] = i % 32 == 0 ? 127.0f : static_cast<float>(i % 100) - 50.5f;
  inputs.push_back(ties);
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    inputs.push_back(random_floats(cols, 5));
    inputs.back()[300] = bad;
  }
  inputs.push_back(std::vector<float>(cols, -0.0f));
  for (const Kernels* k : fast_kernels()) {
    for (const auto& x : inputs) {
      for (const Encoding e : {Encoding::q8_0, Encoding::q4_k}) {
        CHECK(quantize(*k, e, x, 1, cols) == quantize(scalar_kernels(), e, x, 1, cols));
      }
    }
  }
}

TEST(kernels_matmul_q8_same_bits_for_every_token_count) {
  const size_t rows = 16 * 3 + 5, cols = 768, most = 17;
  for (const Encoding e : kBlocks) {
    const Stored w = random_matrix(e, rows, cols, 6);
    const auto x = random_floats(most * cols, 7);
    const auto acts = quantize(scalar_kernels(), e, x, most, cols);
    const auto truth = multiply(scalar_kernels(), w.matrix, acts, most);
    for (const Kernels* k : fast_kernels()) {
      for (size_t tokens = 1; tokens <= most; ++tokens) {
        const auto y = multiply(*k, w.matrix, acts, tokens);
        CHECK(same_bits(y, {truth.begin(), truth.begin() + static_cast<ptrdiff_t>(tokens * rows)}));
      }
    }
  }
}

TEST(kernels_matmul_q8_many_tokens) {  // more than one block of tokens
  const size_t rows = 32, cols = 256, tokens = 203;
  for (const Encoding e : kBlocks) {
    const Stored w = random_matrix(e, rows, cols, 8);
    const auto acts = quantize(scalar_kernels(), e, random_floats(tokens * cols, 9), tokens, cols);
    const auto truth = multiply(scalar_kernels(), w.matrix, acts, tokens);
    for (const Kernels* k : fast_kernels()) CHECK(same_bits(multiply(*k, w.matrix, acts, tokens), truth));
  }
}

TEST(kernels_matmul_q8_row_splits_index_and_stride) {
  const size_t rows = 16 * 4 + 9, cols = 512, tokens = 6, stride = rows + 7;
  const uint32_t index[tokens] = {3, 0, 3, 5, 1, 1};
  for (const Encoding e : kBlocks) {
    const Stored w = random_matrix(e, rows, cols, 10);
    const auto acts = quantize(scalar_kernels(), e, random_floats(6 * cols, 11), 6, cols);
    const auto in_order = multiply(scalar_kernels(), w.matrix, acts, 6);
    std::vector<float> truth;
    for (const uint32_t i : index) truth.insert(truth.end(), &in_order[i * rows], &in_order[i * rows] + rows);
    for (const Kernels* k : all_kernels()) {
      if (!k->supported()) continue;
      for (const std::vector<size_t>& cuts :
           {std::vector<size_t>{0, rows}, {0, 16, rows}, {0, 48, 64, rows}, {0, 32, 48, 64, rows}}) {
        std::vector<float> y(tokens * stride, 42.0f);
        for (size_t c = 0; c + 1 < cuts.size(); ++c) {
          k->matmul_q8(w.matrix, acts.data(), index, tokens, cuts[c], cuts[c + 1], y.data(), stride);
        }
        for (size_t t = 0; t < tokens; ++t) {
          CHECK(std::memcmp(&y[t * stride], &truth[t * rows], rows * sizeof(float)) == 0);
          for (size_t r = rows; r < stride; ++r) CHECK_EQ(y[t * stride + r], 42.0f);
        }
      }
    }
  }
}

TEST(kernels_matmul_q8_at_the_ends_of_the_integers) {
  const size_t rows = 16, cols = 512, tokens = 5;
  std::vector<float> x(tokens * cols);
  std::mt19937 rng(12);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t t = i / cols;
    x[i] = t == 0 ? 127.0f : t == 1 ? -127.0f : t == 2 ? (i % 2 ? 127.0f : -127.0f) : (rng() % 2 ? 127.0f : -127.0f);
  }
  for (const Encoding e : kBlocks) {
    for (const uint8_t fill : {0xff, 0x00, 0x80, 0x7f, 0x0f, 0xf0}) {
      const Stored w = extreme_matrix(e, rows, cols, fill);
      const auto acts = quantize(scalar_kernels(), e, x, tokens, cols);
      const auto truth = multiply(scalar_kernels(), w.matrix, acts, tokens);
      CHECK(error_of(truth, exact_product(w.values, x, rows, cols, tokens)) < 1e-6);
      for (const Kernels* k : fast_kernels()) CHECK(same_bits(multiply(*k, w.matrix, acts, tokens), truth));
    }
  }
}

TEST(kernels_matmul_q8_random_bytes) {  // any levels and sub-scales, not only those an encoder makes
  const size_t rows = 48, cols = 1024, tokens = 7;
  std::mt19937 rng(13);
  for (const Encoding e : kBlocks) {
    const uint32_t block = encoding_info(e).block_bytes;
    std::vector<uint8_t> bytes(stored_bytes(e, Layout::rows, rows, cols));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
    for (size_t i = 0; i < bytes.size(); i += block) {
      const auto some = [&] { return static_cast<float>(rng() % 100) / 64 - 0.7f; };
      put_block_scales(e, &bytes[i], some(), some());
    }
    const Stored w = store_rows(e, bytes, rows, cols, Layout::panel16);
    const auto acts = quantize(scalar_kernels(), e, random_floats(tokens * cols, 14), tokens, cols);
    const auto truth = multiply(scalar_kernels(), w.matrix, acts, tokens);
    for (const Kernels* k : fast_kernels()) CHECK(same_bits(multiply(*k, w.matrix, acts, tokens), truth));
  }
}

TEST(kernels_non_finite_activations_reach_every_output) {
  const size_t rows = 32, cols = 512;
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    for (const Encoding e : kBlocks) {
      const Stored w = random_matrix(e, rows, cols, 15);
      for (const float bad : {NAN, INFINITY}) {
        auto x = random_floats(cols, 16);
        x[400] = bad;
        for (const float v : multiply(*k, w.matrix, quantize(*k, e, x, 1, cols), 1)) CHECK(std::isnan(v));
      }
    }
  }
}

TEST(kernels_matmul_f32_against_double_and_batch_invariant) {
  const size_t rows = 16 * 2 + 11, most = 9;
  for (const Encoding e : kAll) {
    for (const size_t cols : {size_t{512}, size_t{256}, size_t{77}}) {
      if (cols % encoding_info(e).block_values != 0) continue;
      for (const Layout layout : {Layout::panel16, Layout::rows}) {
        const Stored w = random_matrix(e, rows, cols, 17, layout);
        const auto x = random_floats(most * cols, 18);
        const auto exact = exact_product(w.values, x, rows, cols, most);
        const uint32_t index[most] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
        for (const Kernels* k : all_kernels()) {
          if (!k->supported()) continue;
          std::vector<float> all(most * rows);
          k->matmul_f32(w.matrix, x.data(), cols, index, most, 0, rows, all.data(), rows);
          CHECK(error_of(all, exact) < 2e-6);
          for (size_t tokens = 1; tokens <= most; ++tokens) {
            std::vector<float> y(tokens * rows);
            k->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, 0, 16, y.data(), rows);
            k->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, 16, rows, y.data(), rows);
            CHECK(same_bits(y, {all.begin(), all.begin() + static_cast<ptrdiff_t>(tokens * rows)}));
          }
        }
      }
    }
  }
}

TEST(kernels_matmul_f32_plain_rows_split_anywhere) {
  const size_t rows = 29, cols = 100, tokens = 5;
  for (const Encoding e : {Encoding::f32, Encoding::f16, Encoding::bf16}) {
    const Stored w = random_matrix(e, rows, cols, 19);
    const auto x = random_floats(tokens * cols, 20);
    for (const Kernels* k : all_kernels()) {
      if (!k->supported()) continue;
      std::vector<float> all(tokens * rows), split(tokens * rows);
      k->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, 0, rows, all.data(), rows);
      for (size_t r = 0; r < rows; r += 3) {
        k->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, r, std::min(rows, r + 3), split.data(), rows);
      }
      CHECK(same_bits(all, split));
    }
  }
}

TEST(kernels_matmul_f32_index_and_strides) {
  const size_t rows = 21, cols = 256, x_stride = cols + 3, y_stride = rows + 2;
  const uint32_t index[5] = {2, 0, 2, 1, 1};
  for (const Encoding e : kAll) {
    const Stored w = random_matrix(e, rows, cols, 32);
    const auto x = random_floats(3 * x_stride, 33);
    for (const Kernels* k : all_kernels()) {
      if (!k->supported()) continue;
      std::vector<float> in_order(3 * rows), y(5 * y_stride, 42.0f);
      k->matmul_f32(w.matrix, x.data(), x_stride, nullptr, 3, 0, rows, in_order.data(), rows);
      k->matmul_f32(w.matrix, x.data(), x_stride, index, 5, 0, rows, y.data(), y_stride);
      for (size_t t = 0; t < 5; ++t) {
        CHECK(std::memcmp(&y[t * y_stride], &in_order[index[t] * rows], rows * sizeof(float)) == 0);
        for (size_t r = rows; r < y_stride; ++r) CHECK_EQ(y[t * y_stride + r], 42.0f);
      }
    }
  }
}

TEST(kernels_float_mode_multiplies_by_the_decoded_values) {  // the identity as input gives the weights, bit for bit
  for (const Encoding e : kBlocks) {
    const size_t cols = 256, rows = 16;
    const Stored w = random_matrix(e, rows, cols, 21);
    std::vector<float> eye(cols * cols, 0.0f), y(cols * rows);
    for (size_t i = 0; i < cols; ++i) eye[i * cols + i] = 1.0f;
    for (const Kernels* k : fast_kernels()) {
      k->matmul_f32(w.matrix, eye.data(), cols, nullptr, cols, 0, rows, y.data(), rows);
      for (size_t i = 0; i < cols; ++i) {
        for (size_t r = 0; r < rows; ++r) CHECK_EQ(y[i * rows + r], w.values[r * cols + i]);
      }
    }
  }
}

TEST(kernels_fast_float_kernels_agree_bit_for_bit) {  // one source over one vocabulary: AVX2 and AVX-512 are the same
  const auto fast = fast_kernels();
  if (fast.size() < 2) return;
  for (const Encoding e : kAll) {
    const size_t rows = 37, cols = encoding_info(e).plain ? 300 : 512, tokens = 6;
    const Stored w = random_matrix(e, rows, cols, 22);
    const auto x = random_floats(tokens * cols, 23);
    std::vector<float> a(tokens * rows), b(tokens * rows);
    fast[0]->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, 0, rows, a.data(), rows);
    fast[1]->matmul_f32(w.matrix, x.data(), cols, nullptr, tokens, 0, rows, b.data(), rows);
    CHECK(same_bits(a, b));
  }
}

TEST(kernels_attention_against_double) {
  for (const size_t dim : {size_t{64}, size_t{128}, size_t{80}, size_t{20}, size_t{256}}) {
    for (const size_t n : {size_t{1}, size_t{7}, size_t{8}, size_t{64}, size_t{67}}) {
      const auto q = random_floats(dim, 24), kv = random_floats(n * dim, 25), p = random_floats(n, 26);
      std::vector<uint16_t> half(n * dim);
      for (size_t i = 0; i < half.size(); ++i) half[i] = f32_to_f16(kv[i]);
      for (const bool f32 : {true, false}) {
        const void* data = f32 ? static_cast<const void*>(kv.data()) : half.data();
        const auto value = [&](size_t i) { return static_cast<double>(f32 ? kv[i] : f16_to_f32(half[i])); };
        std::vector<double> scores(n, 0.0), sums(dim, 0.5);
        for (size_t i = 0; i < n; ++i) {
          for (size_t d = 0; d < dim; ++d) {
            scores[i] += 0.125 * q[d] * value(i * dim + d);
            sums[d] += static_cast<double>(p[i]) * value(i * dim + d);
          }
        }
        for (const Kernels* k : all_kernels()) {
          if (!k->supported()) continue;
          std::vector<float> s(n), acc(dim, 0.5f), one(1);
          k->attn_scores(q.data(), data, f32, n, dim, 0.125f, s.data());
          k->attn_values(p.data(), data, f32, n, dim, acc.data());
          CHECK(error_of(s, scores) < 2e-6);
          CHECK(error_of(acc, sums) < 2e-6);
          k->attn_scores(q.data(), data, f32, 1, dim, 0.125f, one.data());  // a key's score does not depend on the tile
          CHECK_EQ(one[0], s[0]);
        }
      }
    }
  }
}

TEST(kernels_attention_values_in_two_tiles_are_the_same_bits) {
  const size_t n = 50, dim = 72;
  const auto v = random_floats(n * dim, 27), p = random_floats(n, 28);
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    std::vector<float> whole(dim, 0.0f), parts(dim, 0.0f);
    k->attn_values(p.data(), v.data(), true, n, dim, whole.data());
    k->attn_values(p.data(), v.data(), true, 13, dim, parts.data());
    k->attn_values(p.data() + 13, v.data() + 13 * dim, true, n - 13, dim, parts.data());
    CHECK(same_bits(whole, parts));
  }
}

// A tile of random keys and values in each form, its queries and what became of them.
struct Folded {
  std::vector<float> out, max, sum;
};

Folded fold(const Kernels& k, AttnTile tile, const std::vector<const float*>& q, const std::vector<size_t>& tiles) {
  Folded f{std::vector<float>(q.size() * tile.value_dim, 0.0f), std::vector<float>(q.size(), -INFINITY),
           std::vector<float>(q.size(), 0.0f)};
  std::vector<float> scores(attn_score_floats(64));
  for (const size_t n : tiles) {
    tile.n = n;
    k.attn_fold(tile, q.data(), q.size(), scores.data(), f.out.data(), f.max.data(), f.sum.data());
    tile.keys += n * tile.row_bytes;
    tile.values += n * tile.row_bytes;
  }
  return f;
}

struct StoredRows {
  std::vector<float> values;   // as the rows say them
  std::vector<uint8_t> bytes;  // of one row after the other
  size_t row_bytes;
};

StoredRows store_rows(KvRows rows, const std::vector<float>& x, size_t dim) {
  const Kernels& scalar = *choose_kernels("scalar").value();
  if (rows == KvRows::kv8) {
    StoredRows s{x, std::vector<uint8_t>(x.size() / Kv8Block::kValues * sizeof(Kv8Block)), dim / 32 * sizeof(Kv8Block)};
    scalar.f32_to_kv8_row(x.data(), x.size(), s.bytes.data());
    scalar.kv8_to_f32_row(s.bytes.data(), x.size(), s.values.data());
    return s;
  }
  const size_t size = rows == KvRows::f16 ? 2 : 4;
  StoredRows s{x, std::vector<uint8_t>(x.size() * size), dim * size};
  if (rows == KvRows::f32) std::memcpy(s.bytes.data(), x.data(), s.bytes.size());
  if (rows == KvRows::f16) {
    scalar.f32_to_f16_row(x.data(), x.size(), reinterpret_cast<uint16_t*>(s.bytes.data()));
    scalar.f16_to_f32_row(reinterpret_cast<const uint16_t*>(s.bytes.data()), x.size(), s.values.data());
  }
  return s;
}

constexpr KvRows kKvRows[] = {KvRows::f16, KvRows::f32, KvRows::kv8};

TEST(kernels_attn_fold_against_double) {
  for (const KvRows rows : kKvRows) {
    for (const size_t dim : {size_t{32}, size_t{64}, size_t{96}, size_t{128}, size_t{20}, size_t{576}}) {
      if (rows == KvRows::kv8 && dim % 32 != 0) continue;
      const size_t value_dim = dim == 576 ? 512 : dim, n = 64 + 37, queries = 15;  // passes of 8, 4, 2 and 1
      const StoredRows k = store_rows(rows, random_floats(n * dim, 51), dim);
      const StoredRows v = store_rows(rows, random_floats(n * dim, 52), dim);
      const auto x = random_floats(queries * dim, 53, 3.0f);
      std::vector<const float*> q;
      for (size_t i = 0; i < queries; ++i) q.push_back(x.data() + i * dim);
      std::vector<double> truth(queries * value_dim, 0.0);
      for (size_t i = 0; i < queries; ++i) {
        std::vector<double> p(n, 0.0);
        double top = -INFINITY, sum = 0;
        for (size_t j = 0; j < n; ++j) {
          for (size_t d = 0; d < dim; ++d) p[j] += 0.1 * q[i][d] * k.values[j * dim + d];
          top = std::max(top, p[j]);
        }
        for (size_t j = 0; j < n; ++j) sum += p[j] = std::exp(p[j] - top);
        for (size_t j = 0; j < n; ++j)
          for (size_t d = 0; d < value_dim; ++d) truth[i * value_dim + d] += p[j] / sum * v.values[j * dim + d];
      }
      const AttnTile tile{rows, k.bytes.data(), v.bytes.data(), 0, k.row_bytes, dim, value_dim, 0.1f, 0};
      for (const Kernels* kernels : all_kernels()) {
        if (!kernels->supported()) continue;
        Folded f = fold(*kernels, tile, q, {37, 64});
        for (size_t i = 0; i < f.out.size(); ++i) f.out[i] /= f.sum[i / value_dim];
        CHECK(error_of(f.out, truth) < 1e-5);
      }
    }
  }
}

TEST(kernels_attn_fold_a_query_is_as_alone_and_isas_agree_bit_for_bit) {
  for (const KvRows rows : kKvRows) {
    const size_t dim = 128, n = 64 + 29, queries = 15;
    const StoredRows k = store_rows(rows, random_floats(n * dim, 54), dim);
    const StoredRows v = store_rows(rows, random_floats(n * dim, 55), dim);
    const auto x = random_floats(queries * dim, 56, 3.0f);
    std::vector<const float*> q;
    for (size_t i = 0; i < queries; ++i) q.push_back(x.data() + i * dim);
    AttnTile tile{rows, k.bytes.data(), v.bytes.data(), 0, k.row_bytes, dim, dim, 0.1f, 0};
    std::vector<Folded> all;
    for (const Kernels* kernels : fast_kernels()) {
      all.push_back(fold(*kernels, tile, q, {64, 29}));
      for (size_t i = 0; i < queries; ++i) {
        const Folded one = fold(*kernels, tile, {q[i]}, {64, 29});
        CHECK(std::equal(one.out.begin(), one.out.end(), all.back().out.begin() + static_cast<ptrdiff_t>(i * dim)));
        CHECK(one.max[0] == all.back().max[i] && one.sum[0] == all.back().sum[i]);
      }
    }
    for (const Folded& f : all)
      CHECK(same_bits(f.out, all[0].out) && same_bits(f.max, all[0].max) && same_bits(f.sum, all[0].sum));
    tile.ahead = 64 * tile.row_bytes;  // changes time only
    CHECK(all.empty() || same_bits(fold(*fast_kernels()[0], tile, q, {64, 29}).out, all[0].out));
  }
}

TEST(kernels_exp_within_one_and_a_half_ulp) {
  for (const Kernels* k : fast_kernels()) {
    double worst = 0;
    for (float x = -87.3f; x < 88.2f; x += 0.00137f) {
      float y = x;
      k->exp_sum(&y, 1, 0.0f);
      const double exact = std::exp(static_cast<double>(x));
      const double ulp =
          std::nextafter(static_cast<float>(exact), INFINITY) - static_cast<double>(static_cast<float>(exact));
      worst = std::max(worst, std::fabs(y - exact) / ulp);
    }
    CHECK(worst < 1.5);
    float edges[5] = {-200.0f, -INFINITY, -88.0f, 0.0f, NAN};
    CHECK(std::isnan(k->exp_sum(edges, 5, 0.0f)));
    CHECK(edges[0] == 0 && edges[1] == 0 && edges[2] == 0 && edges[3] == 1 && std::isnan(edges[4]));
  }
}

TEST(kernels_vectors_against_double) {
  for (const size_t n : {size_t{1}, size_t{15}, size_t{16}, size_t{33}, size_t{200}, size_t{2048}}) {
    const auto x = random_floats(n, 29, 3.0f), w = random_floats(n, 30);
    double squares = 0, total = 0, highest = -INFINITY;
    for (const float v : x) {
      squares += static_cast<double>(v) * v;
      highest = std::max<double>(highest, v);
    }
    std::vector<double> norm(n), silu(n), exps(n);
    for (size_t i = 0; i < n; ++i) {
      norm[i] = x[i] * static_cast<double>(w[i]) / std::sqrt(squares / static_cast<double>(n) + 1e-5);
      silu[i] = x[i] / (1 + std::exp(-static_cast<double>(x[i]))) * w[i];
      exps[i] = std::exp(x[i] - highest);
      total += exps[i];
    }
    for (const Kernels* k : all_kernels()) {
      if (!k->supported()) continue;
      std::vector<float> out(n + 1, 42.0f), gate = x, e = x;
      k->rms_norm(x.data(), w.data(), n, 1e-5f, out.data());
      CHECK_EQ(out[n], 42.0f);
      out.pop_back();
      CHECK(error_of(out, norm) < 1e-6);
      k->silu_mul(gate.data(), w.data(), n);
      CHECK(error_of(gate, silu) < 1e-6);
      CHECK_EQ(k->max_value(x.data(), n), static_cast<float>(highest));
      CHECK(std::fabs(k->exp_sum(e.data(), n, static_cast<float>(highest)) / total - 1) < 2e-6);
      CHECK(error_of(e, exps) < 1e-6);
    }
  }
}

TEST(kernels_silu_of_large_values) {
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    float gate[4] = {-1e30f, -120.0f, 120.0f, 1e30f};
    const float up[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    k->silu_mul(gate, up, 4);
    CHECK(std::fabs(gate[0]) < 1e-6f && std::fabs(gate[1]) < 1e-30f);
    CHECK(gate[2] == 120.0f && gate[3] == 1e30f);
  }
}

TEST(kernels_f16_row_same_bits) {
  auto x = random_floats(1000, 31);
  for (size_t i = 0; i < 300; ++i) x[i] *= std::ldexp(1.0f, static_cast<int>(i % 60) - 40);
  x[0] = 65520.0f;
  x[1] = NAN;
  x[2] = -INFINITY;
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    for (const size_t n : {size_t{1}, size_t{37}, size_t{1000}}) {
      std::vector<uint16_t> out(n + 1, 7);
      k->f32_to_f16_row(x.data(), n, out.data());
      for (size_t i = 0; i < n; ++i) CHECK_EQ(out[i], f32_to_f16(x[i]));
      CHECK_EQ(out[n], 7);
    }
  }
}

TEST(kernels_kv8_row_is_within_half_a_level_and_the_same_everywhere) {
  std::vector<float> x = random_floats(320, 5);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0f, static_cast<int>(i / 32) - 4);
  std::fill_n(x.begin() + 64, 32, 0.0f);
  x[100] = NAN;
  x[130] = INFINITY;
  std::fill_n(x.begin() + 160, 32, 1e-12f);  // the scale is nothing in f16
  const size_t bytes = x.size() / Kv8Block::kValues * sizeof(Kv8Block);
  std::vector<uint8_t> expected(bytes);
  scalar_kernels().f32_to_kv8_row(x.data(), x.size(), expected.data());
  std::vector<float> back(x.size());
  scalar_kernels().kv8_to_f32_row(expected.data(), x.size(), back.data());
  for (size_t b = 0; b < x.size(); b += 32) {
    if (b == 64 || b == 96 || b == 128 || b == 160) {
      for (size_t i = b; i < b + 32; ++i) CHECK_EQ(b == 96 || b == 128 ? 0.0f : back[i], 0.0f);
      continue;
    }
    float most = 0;
    for (size_t i = b; i < b + 32; ++i) most = std::max(most, std::fabs(x[i]));
    for (size_t i = b; i < b + 32; ++i) CHECK(std::fabs(back[i] - x[i]) <= most / 127 * 0.51f);
  }
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    std::vector<uint8_t> out(bytes + 1, 7);
    k->f32_to_kv8_row(x.data(), x.size(), out.data());
    CHECK_EQ(out[bytes], 7);
    std::vector<float> decoded(x.size());
    k->kv8_to_f32_row(out.data(), x.size(), decoded.data());
    for (size_t b = 0; b < x.size(); b += 32) {
      if (b == 96 || b == 128) continue;  // not finite: whatever it is, it is not read as a number
      CHECK(std::memcmp(&out[b / 32 * sizeof(Kv8Block)], &expected[b / 32 * sizeof(Kv8Block)], sizeof(Kv8Block)) == 0);
      CHECK(std::memcmp(&decoded[b], &back[b], 32 * sizeof(float)) == 0);
    }
  }
}

TEST(kernels_f16_row_comes_back) {
  std::vector<uint16_t> x(65536);  // every half there is
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  for (const Kernels* k : all_kernels()) {
    if (!k->supported()) continue;
    for (const size_t n : {size_t{1}, size_t{37}, x.size()}) {
      std::vector<float> out(n + 1, 7);
      k->f16_to_f32_row(x.data(), n, out.data());
      size_t different = 0;
      for (size_t i = 0; i < n; ++i) {
        const float expected = f16_to_f32(x[i]);
        different +=
            std::isnan(expected) ? !std::isnan(out[i]) : out[i] != expected || std::signbit(out[i]) != (i >> 15);
      }
      CHECK_EQ(different, 0u);
      CHECK_EQ(out[n], 7.0f);
    }
  }
}

TEST(kernels_recurrences_against_double) {
  for (const size_t values : {size_t{64}, size_t{100}, size_t{7}}) {
    const size_t keys = 37, taps = 4;
    const auto decay = random_floats(keys, 31), k = random_floats(keys, 32), u = random_floats(values, 33);
    const auto q = random_floats(keys, 34), start = random_floats(keys * values, 35),
               x = random_floats(values * taps, 36);
    const auto a = random_floats(keys * values, 37), dt = random_floats(values, 38), bias = random_floats(values, 39);
    const float* rows[taps];
    for (size_t j = 0; j < taps; ++j) rows[j] = x.data() + j * values;
    std::vector<double> conv(values), out(values, 0.0), selective(values, 0.0), state(keys * values);
    for (size_t v = 0; v < values; ++v) {
      double sum = bias[v];
      for (size_t j = 0; j < taps; ++j) sum += double{a[j * values + v]} * rows[j][v];
      conv[v] = sum / (1 + std::exp(-sum));
      for (size_t i = 0; i < keys; ++i) {
        const double old = start[i * values + v], add = double{k[i]} * u[v];
        state[i * values + v] = decay[i] * old + add;
        out[v] += q[i] * state[i * values + v];
        selective[v] += q[i] * (std::exp(double{dt[v]} * a[i * values + v]) * old + add);
      }
    }
    for (const Kernels* kernels : all_kernels()) {
      if (!kernels->supported()) continue;
      std::vector<float> y(values), s = start, silent = start;
      kernels->conv_row(rows, a.data(), values, bias.data(), taps, values, true, y.data());
      CHECK(error_of(y, conv) < 2e-6);
      kernels->state_step(s.data(), keys, values, decay.data(), k.data(), u.data(), q.data(), y.data());
      CHECK(error_of(y, out) < 2e-6);
      CHECK(error_of(s, state) < 2e-6);
      kernels->state_step(silent.data(), keys, values, decay.data(), k.data(), u.data(), q.data(), nullptr);
      CHECK(same_bits(s, silent));
      s = start;
      kernels->selective_step(s.data(), keys, values, a.data(), values, dt.data(), k.data(), u.data(), q.data(),
                              y.data());
      CHECK(error_of(y, selective) < 2e-6);
    }
  }
}
