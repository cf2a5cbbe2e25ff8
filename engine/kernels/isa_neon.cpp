// Arm's baseline vector instructions, which every 64-bit processor has.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/act.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "quant/codec.h"

namespace smoe {
namespace {

#include "kernels/arm_lanes.h"
#include "kernels/lanes_kernels.h"
#include "kernels/lanes_matmul.h"
#include "kernels/lanes_queries.h"

// A product of two bytes fits 16 bits (|w| <= 128, |x| <= 127), and so does the sum of two of them but for two times
// -128 * -127, which is why pairs are added in 32 bits.
inline int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x) {
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#include "kernels/neon_tiles.h"
#include "kernels/panel_tiles.h"

}  // namespace
}  // namespace smoe

namespace smoe {
namespace {

bool supported() { return true; }

constexpr Kernels kNeon = {
    "neon",         10,       supported,  quantize_act,  matmul_q8, matmul_f32,     attn_scores,    attn_values,
    attn_fold,      rms_norm, silu_mul,   exp_sum,       max_value, f32_to_f16_row, f16_to_f32_row, f32_to_kv8_row,
    kv8_to_f32_row, conv_row, state_step, selective_step};
const RegisterKernels registration(&kNeon);

}  // namespace
}  // namespace smoe

#endif  // __aarch64__
