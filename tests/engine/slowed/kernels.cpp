// Kernels as the best of this machine, except that each matrix multiplication lasts 5% longer: what a measurement must
// be able to find. Linked into smoe-engine-slowed only.
#include "kernels/kernels.h"

#include <chrono>

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSlower = 0.05;
constexpr int kAboveAll = 1 << 20;

Kernels best;  // what the slowed ones call

void linger(Clock::time_point start) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>((Clock::now() - start) * kSlower);
  while (Clock::now() < end) {
  }
}

void matmul_q8(const Matrix& w, const uint8_t* acts, const uint32_t* act_index, size_t tokens, size_t row0, size_t row1,
               float* y, size_t y_stride) {
  const auto start = Clock::now();
  best.matmul_q8(w, acts, act_index, tokens, row0, row1, y, y_stride);
  linger(start);
}

void matmul_f32(const Matrix& w, const float* x, size_t x_stride, const uint32_t* x_index, size_t tokens, size_t row0,
                size_t row1, float* y, size_t y_stride) {
  const auto start = Clock::now();
  best.matmul_f32(w, x, x_stride, x_index, tokens, row0, row1, y, y_stride);
  linger(start);
}

Kernels slowed;

Kernels* announced();

// Fills the table when it is first asked about: by then every other kernel file has registered itself.
bool supported() {
  for (const Kernels* k : all_kernels()) {
    if (k->rank < kAboveAll && k->supported()) best = *k;
  }
  slowed = best;
  announced();
  slowed.matmul_q8 = matmul_q8;
  slowed.matmul_f32 = matmul_f32;
  return true;
}

Kernels* announced() {
  slowed.name = "slowed";
  slowed.rank = kAboveAll;
  slowed.supported = supported;
  return &slowed;
}

const RegisterKernels registration(announced());

}  // namespace
}  // namespace smoe
