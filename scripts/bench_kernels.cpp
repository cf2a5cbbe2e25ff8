// Speed of the matrix kernels on one thread: bench_kernels [isa] [rows] [cols] [MiB of weights] [encodings]
// tokens = 1 reads weights that do not fit a cache (decode: GB/s of weight bytes); tokens = 32 uses one matrix that
// does (prefill: useful 10^9 operations a second, two for each weight and token).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "quant/quant.h"

using namespace smoe;

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Panels of random rows, repeated until `bytes` are filled: [copies][rows, cols].
std::vector<uint8_t> make_weights(Encoding e, uint64_t rows, uint64_t cols, size_t copies) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(16 * cols);
  for (float& v : x) v = normal(rng);
  std::vector<uint8_t> stored(stored_bytes(e, Layout::rows, 16, cols)), panel(stored.size());
  if (!encode_rows(e, x.data(), 16, cols, stored.data()).is_ok()) std::abort();
  pack_panels(e, stored.data(), 16, cols, panel.data());
  std::vector<uint8_t> out(panel.size() * (rows / 16) * copies);
  for (size_t i = 0; i < out.size(); i += panel.size()) std::copy(panel.begin(), panel.end(), out.begin() + i);
  return out;
}

struct Inputs {
  std::vector<float> x, y;
  std::vector<uint8_t> acts;
};

Inputs make_inputs(const Kernels& k, ActFormat f, size_t tokens, uint64_t rows, uint64_t cols) {
  Inputs in;
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  in.x.resize(tokens * cols);
  for (float& v : in.x) v = normal(rng);
  in.y.resize(tokens * rows);
  in.acts.resize(tokens * act_row_bytes(f, cols));
  if (f != ActFormat::none) k.quantize_act(f, in.x.data(), tokens, cols, cols, in.acts.data());
  return in;
}

// Best seconds for one pass over all copies.
double best_pass(const Kernels& k, Encoding e, const std::vector<uint8_t>& weights, size_t copies, uint64_t rows,
                 uint64_t cols, size_t tokens) {
  const ActFormat f = act_format(e);
  Inputs in = make_inputs(k, f, tokens, rows, cols);
  double best = 1e9, total = 0;
  for (int pass = 0; pass < 200 && (pass < 3 || total < 0.6); ++pass) {
    const double start = seconds();
    for (size_t c = 0; c < copies; ++c) {
      const Layout layout = f == ActFormat::none ? Layout::rows : Layout::panel16;
      const Matrix w = {e, layout, rows, cols, weights.data() + weights.size() / copies * c};
      if (f == ActFormat::none) {
        k.matmul_f32(w, in.x.data(), cols, nullptr, tokens, 0, rows, in.y.data(), rows);
      } else {
        k.matmul_q8(w, in.acts.data(), nullptr, tokens, 0, rows, in.y.data(), rows);
      }
    }
    const double elapsed = seconds() - start;
    best = std::min(best, elapsed);
    total += elapsed;
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const auto chosen = choose_kernels(argc > 1 ? argv[1] : "auto");
  if (!chosen.is_ok()) {
    std::fprintf(stderr, "%s (%s)\n", chosen.status().message().c_str(), chosen.status().hint().c_str());
    return 2;
  }
  const Kernels& k = **(&chosen.value());
  const uint64_t rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 768;
  const uint64_t cols = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 2048;
  const uint64_t mib = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 256;
  std::printf("isa %s, rows %llu, cols %llu, one thread\n", k.name, static_cast<unsigned long long>(rows),
              static_cast<unsigned long long>(cols));
  for (const Encoding e : all_encodings()) {
    if (argc > 5 && std::string(argv[5]).find(encoding_info(e).name) == std::string::npos) continue;
    const uint64_t bytes = rows * row_bytes(e, cols);
    const size_t copies = std::max<size_t>(1, (mib << 20) / bytes);
    const auto weights = make_weights(e, rows, cols, copies);
    const double one = best_pass(k, e, weights, copies, rows, cols, 1) / static_cast<double>(copies);
    const std::vector<uint8_t> single(weights.begin(), weights.begin() + static_cast<ptrdiff_t>(bytes));
    const double cached = best_pass(k, e, single, 1, rows, cols, 1);
    const double many = best_pass(k, e, single, 1, rows, cols, 32);
    const double ops = 2.0 * static_cast<double>(rows * cols);
    std::printf("%-7s tokens 1: %6.1f GB/s from memory, %6.1f GB/s from cache, %6.0f GOP/s; tokens 32: %6.0f GOP/s\n",
                encoding_info(e).name, static_cast<double>(bytes) / one / 1e9,
                static_cast<double>(bytes) / cached / 1e9, ops / cached / 1e9, 32 * ops / many / 1e9);
  }
}
