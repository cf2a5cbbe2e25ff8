// Speed of the matrix kernels: bench_kernels [isa] [rows] [cols] [MiB of weights] [encodings, or all] [threads]
// 1, 2, 4 and 8 tokens read weights that do not fit a cache (decode, GB/s of weight bytes), each thread the same share
// of every matrix's rows; then the same on one thread with one matrix that does, and 32 tokens (prefill, useful 10^9
// operations a second, two for each weight and token). Best passes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
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

struct Job {
  const Kernels& k;
  Encoding e;
  const std::vector<uint8_t>& weights;  // [copies][rows, cols]
  size_t copies;
  uint64_t rows, cols;
};

// Rows [row0, row1) of every copy.
void pass(const Job& job, Inputs& in, size_t tokens, uint64_t row0, uint64_t row1) {
  const bool plain = act_format(job.e) == ActFormat::none;
  for (size_t c = 0; c < job.copies; ++c) {
    const Matrix w = {job.e, plain ? Layout::rows : Layout::panel16, job.rows, job.cols,
                      job.weights.data() + job.weights.size() / job.copies * c};
    if (plain) {
      job.k.matmul_f32(w, in.x.data(), job.cols, nullptr, tokens, row0, row1, in.y.data(), job.rows);
    } else {
      job.k.matmul_q8(w, in.acts.data(), nullptr, tokens, row0, row1, in.y.data(), job.rows);
    }
  }
}

// Best seconds for one pass over all copies by `threads` threads, which begin each pass together.
double best_pass(const Job& job, size_t tokens, size_t threads = 1) {
  Inputs in = make_inputs(job.k, act_format(job.e), tokens, job.rows, job.cols);
  std::atomic<size_t> begun{0}, done{0};
  std::atomic<bool> stop{false};
  const uint64_t share = (job.rows / threads + 15) / 16 * 16;
  const auto work = [&](size_t thread) {
    pass(job, in, tokens, std::min(job.rows, share * thread), std::min(job.rows, share * (thread + 1)));
  };
  std::vector<std::thread> helpers;
  for (size_t thread = 1; thread < threads; ++thread) {
    helpers.emplace_back([&, thread] {
      for (size_t next = 1;; ++next) {
        while (begun.load() < next && !stop.load()) std::this_thread::yield();
        if (stop.load()) return;
        work(thread);
        ++done;
      }
    });
  }
  double best = 1e9, total = 0;
  for (size_t n = 0; n < 200 && (n < 3 || total < 0.6); ++n) {
    const double start = seconds();
    done = 0;
    ++begun;
    work(0);
    while (done.load() < threads - 1) std::this_thread::yield();
    const double elapsed = seconds() - start;
    best = std::min(best, elapsed);
    total += elapsed;
  }
  stop = true;
  for (std::thread& helper : helpers) helper.join();
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
  const std::string names = argc > 5 ? argv[5] : "all";
  const size_t threads = argc > 6 ? std::max(1ul, std::strtoul(argv[6], nullptr, 10)) : 1;
  std::printf("isa %s, rows %llu, cols %llu, threads %zu\n", k.name, static_cast<unsigned long long>(rows),
              static_cast<unsigned long long>(cols), threads);
  for (const Encoding e : all_encodings()) {
    if (names != "all" && names.find(encoding_info(e).name) == std::string::npos) continue;
    const uint64_t bytes = rows * row_bytes(e, cols);
    const size_t copies = std::max<size_t>(1, (mib << 20) / bytes);
    const auto weights = make_weights(e, rows, cols, copies);
    const std::vector<uint8_t> single(weights.begin(), weights.begin() + static_cast<ptrdiff_t>(bytes));
    std::printf("%-7s GB/s", encoding_info(e).name);
    for (const bool cached : {false, true}) {
      const Job job = {k, e, cached ? single : weights, cached ? 1 : copies, rows, cols};
      std::printf(cached ? ", from cache" : " from memory, tokens");
      for (const size_t tokens : {1, 2, 4, 8}) {
        const double best = best_pass(job, tokens, cached ? 1 : threads);
        std::printf(" %zu: %5.1f", tokens, static_cast<double>(job.weights.size()) / best / 1e9);
      }
    }
    const double many = best_pass({k, e, single, 1, rows, cols}, 32);
    std::printf("; tokens 32: %5.0f GOP/s\n", 2.0 * 32 * static_cast<double>(rows * cols) / many / 1e9);
  }
}
