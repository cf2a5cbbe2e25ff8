// Arm with the dot product instructions (FEAT_DotProd): four products of bytes, and their sum, in one.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/act.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "quant/codec.h"
#include "util/cpu_features.h"

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")

namespace smoe {
namespace {

#include "kernels/arm_lanes.h"
#include "kernels/lanes_kernels.h"
#include "kernels/lanes_matmul.h"
#include "kernels/lanes_queries.h"

inline int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x) { return vdotq_s32(acc, w, x); }

#include "kernels/neon_tiles.h"
#include "kernels/panel_tiles.h"

}  // namespace
}  // namespace smoe

#pragma GCC pop_options

namespace smoe {
namespace {

bool supported() { return cpu_features().dotprod; }

constexpr Kernels kNeonDot = {
    "neon-dot",     20,       supported,  quantize_act,  matmul_q8, matmul_f32,     attn_scores,    attn_values,
    attn_fold,      rms_norm, silu_mul,   exp_sum,       max_value, f32_to_f16_row, f16_to_f32_row, f32_to_kv8_row,
    kv8_to_f32_row, conv_row, state_step, selective_step};
const RegisterKernels registration(&kNeonDot);

}  // namespace
}  // namespace smoe

#endif  // __aarch64__
