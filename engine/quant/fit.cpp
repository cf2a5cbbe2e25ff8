#include "quant/fit.h"

#include <cmath>
#include <cstring>

#include "util/cpu_features.h"

namespace smoe {
namespace {

namespace any {
#include "quant/fit_lanes.h"
}  // namespace any

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "quant/fit_lanes.h"
}  // namespace avx2
#pragma GCC pop_options

bool wide() { return cpu_features().avx2; }
#else
namespace avx2 = any;

bool wide() { return false; }
#endif

}  // namespace

namespace portable {
void fit_q4_k(const float* x, Q4KFit* fit) { any::fit_q4_k(x, fit); }
void fit_q6_k(const float* x, Q6KFit* fit) { any::fit_q6_k(x, fit); }
}  // namespace portable

void fit_q4_k(const float* x, Q4KFit* fit) { return wide() ? avx2::fit_q4_k(x, fit) : any::fit_q4_k(x, fit); }
void fit_q6_k(const float* x, Q6KFit* fit) { return wide() ? avx2::fit_q6_k(x, fit) : any::fit_q6_k(x, fit); }

}  // namespace smoe
