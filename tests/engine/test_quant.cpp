// Encodings in C++: 16-bit floats over every value, levels against decode, panels against rows.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "blocks.h"
#include "check.h"
#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/quant.h"
#include "random_floats.h"

using namespace smoe;

namespace {

const std::vector<Encoding> kBlocks = block_encodings();

// Every processor's search gives the same bytes as the portable one.
template <class Fit, class Search>
void compare(const Search& search) {
  Fit want = {};
  search(*fitters()[0], &want);
  for (const Fitter* const* at = fitters() + 1; *at != nullptr; ++at) {
    Fit got = {};
    search(**at, &got);
    CHECK(std::memcmp(&got, &want, sizeof(got)) == 0);
  }
}

void compare_searches(const FitInput& in) {
  for (const AffineSearch& how : {AffineSearch{15, -1.0f, 0.1f, 20, false}, AffineSearch{3, -0.5f, 0.1f, 15, true},
                                  AffineSearch{15, -0.9f, 0.05f, 36, false, true}}) {
    compare<AffineFit>([&](const Fitter& f, AffineFit* fit) { f.affine(in, how, fit); });
  }
  for (const int32_t most : {4, 8, 32}) {
    compare<SignedFit>([&](const Fitter& f, SignedFit* fit) { f.with_signs(in, most, fit); });
  }
  struct Floats {
    float of[kFitLanes * kFitValues];
  };
  if (in.n == 16) {
    compare<SignedFit>([&](const Fitter& f, SignedFit* fit) { f.stepwise(in, 4, fit); });
  } else {
    compare<Floats>([&](const Fitter& f, Floats* out) { f.uneven(in, out->of); });
    compare<AffineFit>([&](const Fitter& f, AffineFit* fit) { f.affine({32, in.x, nullptr, in.subs}, {}, fit); });
  }
  compare<SignedFit>([&](const Fitter& f, SignedFit* fit) { f.round(in.x, 256, 0.25f, in.x[7], -4, 3, fit->level); });
  const float inverse = 127.0f / std::fabs(*std::max_element(
                                     in.x, in.x + 256, [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
  if (std::isfinite(inverse)) {
    compare<SignedFit>([&](const Fitter& f, SignedFit* fit) { f.round_away(in.x, 256, inverse, fit->level); });
  }
  for (const uint64_t n : {7u, 32u, 251u}) {
    compare<uint32_t>([&](const Fitter& f, uint32_t* out) { *out = f.largest(in.x, n); });
    struct Sums {
      double difference, size;
    };
    compare<Sums>([&](const Fitter& f, Sums* out) { f.squares(in.x, in.w, n, &out->difference, &out->size); });
    compare<Floats>([&](const Fitter& f, Floats* out) { f.widen(reinterpret_cast<const uint8_t*>(in.w), n, out->of); });
  }
  compare<Floats>([&](const Fitter& f, Floats* out) {
    f.spread(reinterpret_cast<const uint8_t*>(in.w), 256, 0.37f, 1.25f, out->of);
  });
}

}  // namespace

TEST(quant_half_round_trip) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = f16_to_f32(static_cast<uint16_t>(h));
    if (std::isnan(f)) {
      CHECK(std::isnan(f16_to_f32(f32_to_f16(f))));
    } else if (f32_to_f16(f) != h) {
      CHECK_EQ(f32_to_f16(f), h);
    }
  }
  CHECK_EQ(f16_to_f32(0x3c01), 1.0009765625f);
  CHECK_EQ(f16_to_f32(0x0001), 0x1p-24f);
}

TEST(quant_half_rounds_to_nearest_even) {
  // Between every two neighbours: the midpoint goes to the even one, a hair beside it to the nearer one.
  for (uint16_t h = 0; h < 0x7bff; ++h) {
    const float a = f16_to_f32(h), b = f16_to_f32(static_cast<uint16_t>(h + 1)), middle = a + (b - a) / 2;
    const uint16_t even = h % 2 == 0 ? h : static_cast<uint16_t>(h + 1);
    CHECK_EQ(f32_to_f16(middle), even);
    if (f32_to_f16(std::nextafter(middle, 0.0f)) != h) CHECK_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), h);
    if (f32_to_f16(std::nextafter(middle, b * 2)) != h + 1) CHECK_EQ(f32_to_f16(std::nextafter(middle, b * 2)), h + 1);
  }
  CHECK_EQ(f32_to_f16(65519.0f), 0x7bff);
  CHECK_EQ(f32_to_f16(65520.0f), 0x7c00);
  CHECK_EQ(f32_to_f16(-0.0f), 0x8000);
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
}

TEST(quant_round_even) {
  CHECK_EQ(round_even(0.5f), 0);
  CHECK_EQ(round_even(1.5f), 2);
  CHECK_EQ(round_even(-2.5f), -2);
  CHECK_EQ(round_even(INFINITY), -4194304);
  CHECK_EQ(round_even(NAN), 0);
}

TEST(quant_levels_are_what_decode_gives) {
  for (const Encoding e : kBlocks) {
    const Codec& c = codec(e);
    const auto x = random_floats(c.info.block_values, 1);
    std::vector<uint8_t> block(c.info.block_bytes);
    std::vector<float> decoded(x.size());
    c.encode_block(x.data(), {}, block.data());
    c.decode_block(block.data(), decoded.data());
    Levels levels;
    c.levels(block.data(), &levels);
    for (uint32_t k = 0; k < x.size(); ++k) {
      const uint32_t s = k / levels.sub;
      const float scale = levels.d * static_cast<float>(levels.scale[s]);
      float value = scale * static_cast<float>(levels.q[k]);
      if (levels.has_min) value -= levels.dmin * static_cast<float>(levels.min[s]);
      CHECK_EQ(value, decoded[k]);
    }
  }
}

TEST(quant_searches_are_the_same_on_every_processor) {
  std::mt19937 rng(3);
  for (int i = 0; i < 400; ++i) {
    auto x = random_floats(kFitLanes * kFitValues, static_cast<uint32_t>(100 + i));
    const int exponent = i % 8 == 0 ? 0 : static_cast<int>(rng() % 160) - 146;  // subnormal and up
    for (size_t k = 0; k < x.size(); ++k) {
      x[k] = std::ldexp(x[k], exponent);
      if (i % 5 == 1) x[k] = -std::fabs(x[k]);
      if (i % 5 == 2 && k / 32 % 2 == 0) x[k] = 0;
      if (i % 5 == 3) x[k] = x[k - k % 32];
      if (i % 5 == 4) x[k] = std::round(x[k]);
    }
    std::vector<float> w(x.size());
    for (size_t k = 0; k < x.size(); ++k)
      w[k] = i % 3 == 0 ? x[k] * x[k] : std::fabs(x[k]) * (i % 3 == 1 ? 1.0f : 3.5f);
    for (const uint32_t n : {16u, 32u}) {
      for (const uint32_t subs : {8u, 16u, 32u, 64u}) compare_searches({n, x.data(), w.data(), subs});
    }
  }
}

TEST(quant_encoders_take_any_finite_value) {  // run under the sanitizers: no overflow, no bad conversion
  for (int exponent = -149; exponent < 27; ++exponent) {
    auto x = random_floats(512, static_cast<uint32_t>(exponent + 500));
    for (float& v : x) v = std::ldexp(v, exponent);
    for (const Encoding e : kBlocks) {
      std::vector<uint8_t> stored(stored_bytes(e, Layout::rows, 1, 512));
      std::vector<float> back(512);
      const Status status = encode_rows(e, x.data(), 1, 512, stored.data());
      if (!status.is_ok()) {
        CHECK(exponent > 12);
        continue;
      }
      decode_rows(e, stored.data(), 512, back.data());
      // Below, the step of a subnormal half, 2^-24, times a sub-block scale of 128 and a level of 32 is what remains.
      const bool coarse = e == Encoding::q2_k || e == Encoding::mxfp4 || (is_mlx(e) && mlx_format(e).bits < 4);
      const float limit = std::ldexp(coarse ? 4.0f : 1.0f, std::max(exponent, -12));
      float worst = 0;
      for (size_t k = 0; k < 512; ++k) worst = std::max(worst, std::fabs(back[k] - x[k]));
      CHECK(worst <= limit);
    }
  }
}

TEST(quant_any_bytes_are_blocks) {  // run under the sanitizers: damaged scales and levels are numbers, or not, but no
                                    // crash
  std::mt19937 rng(4);
  const uint64_t rows = 17, cols = 512;
  for (const Encoding e : kBlocks) {
    std::vector<uint8_t> stored(stored_bytes(e, Layout::rows, rows, cols)), back(stored.size());
    for (uint8_t& b : stored) b = static_cast<uint8_t>(rng());
    std::vector<uint8_t> packed(stored_bytes(e, Layout::panel16, rows, cols));
    pack_panels(e, stored.data(), rows, cols, packed.data());
    unpack_panels(e, packed.data(), rows, cols, back.data());
    CHECK(back == stored);
    std::vector<float> values(cols), of_panel(cols);
    for (uint64_t r = 0; r < rows; ++r) {
      decode_row(e, Layout::rows, stored.data(), rows, cols, r, values.data());
      decode_row(e, Layout::panel16, packed.data(), rows, cols, r, of_panel.data());
      CHECK(std::memcmp(values.data(), of_panel.data(), cols * sizeof(float)) == 0);
    }
  }
}

TEST(quant_sizes) {
  CHECK_EQ(row_bytes(Encoding::q4_k, 512), 288u);
  CHECK_EQ(row_bytes(Encoding::q4_k, 100), 0u);
  CHECK_EQ(stored_bytes(Encoding::q6_k, Layout::panel16, 17, 256), 32u * 210);
  CHECK_EQ(stored_bytes(Encoding::q8_0, Layout::rows, 17, 64), 17u * 68);
  CHECK_EQ(stored_bytes(Encoding::bf16, Layout::rows, 3, 5), 30u);
}

TEST(quant_panels_round_trip_and_missing_rows_are_zero) {
  const uint64_t rows = 19, cols = 512;
  for (const Encoding e : kBlocks) {
    const auto x = random_floats(rows * cols, 2);
    std::vector<uint8_t> stored(stored_bytes(e, Layout::rows, rows, cols)), back(stored.size());
    REQUIRE(encode_rows(e, x.data(), rows, cols, stored.data()).is_ok());
    std::vector<uint8_t> packed(stored_bytes(e, Layout::panel16, rows, cols), 0xaa);
    pack_panels(e, stored.data(), rows, cols, packed.data());
    unpack_panels(e, packed.data(), rows, cols, back.data());
    CHECK(back == stored);
    std::vector<float> all(cols), one(cols);
    decode_rows(e, stored.data() + 18 * row_bytes(e, cols), cols, all.data());
    decode_row(e, Layout::panel16, packed.data(), rows, cols, 18, one.data());
    CHECK(all == one);
    decode_row(e, Layout::panel16, packed.data(), 32, cols, 19, one.data());
    for (const float v : one) CHECK_EQ(v, 0.0f);
  }
}

TEST(quant_refuses_what_cannot_be_stored) {
  std::vector<float> x(512, 1.0f);
  std::vector<uint8_t> out(4096);
  x[300] = NAN;
  const Status status = encode_rows(Encoding::q4_k, x.data(), 1, 512, out.data());
  CHECK(status.code() == Code::failed);
  CHECK(status.message().find("flat index 300") != std::string::npos);
  CHECK(encode_rows(Encoding::q4_k, x.data(), 2, 200, out.data()).code() == Code::usage);
}

TEST(quant_falls_back_to_what_divides) {
  const auto name = [](Encoding e, uint64_t cols) {
    return std::string(encoding_info(fallback_encoding(e, cols)).name);
  };
  CHECK_EQ(name(Encoding::q4_k, 96), "q5_0");
  CHECK_EQ(name(Encoding::q6_k, 96), "q8_0");
  CHECK_EQ(name(Encoding::q4_k, 100), "f16");
  for (const Encoding e : all_encodings()) {
    if (!is_mlx(e)) continue;
    const MlxFormat wanted = mlx_format(e);
    for (const uint64_t cols : {32u, 64u, 96u, 128u, 192u, 384u}) {
      const Encoding used = fallback_encoding(e, cols);
      const MlxFormat got = mlx_format(used);
      CHECK(got.bits == wanted.bits && got.scales == wanted.scales && cols % got.group == 0);
      CHECK(got.group == wanted.group || cols % (2 * got.group) != 0 || got.group == 64);
    }
    CHECK(fallback_encoding(e, 48) == Encoding::f16);
  }
}
