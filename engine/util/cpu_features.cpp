#include "util/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstdint>

namespace smoe {
namespace {

#if defined(__x86_64__)

bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

uint64_t saved_registers() {
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

CpuFeatures detect() {
  CpuFeatures f;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool fma = bit(c, 12), f16c = bit(c, 29), avx = bit(c, 28), osxsave = bit(c, 27);
  if (!osxsave || !avx || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const uint64_t saved = saved_registers();
  const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
  f.avx2 = ymm && fma && f16c && bit(b, 5);
  const bool foundation = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F DQ BW VL
  f.avx512 = f.avx2 && zmm && foundation && bit(c, 11);                          // VNNI
  return f;
}

#elif defined(__aarch64__) && defined(__linux__)

CpuFeatures detect() {
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP, see getauxval(3)
  CpuFeatures f;
  f.dotprod = (getauxval(AT_HWCAP) & kDotProduct) != 0;
  return f;
}

#elif defined(__aarch64__) && defined(__APPLE__)

CpuFeatures detect() {
  CpuFeatures f;
  int value = 0;
  size_t size = sizeof(value);
  f.dotprod = sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value != 0;
  return f;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace smoe
