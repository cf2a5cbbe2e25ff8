// What the processor and the operating system offer for kernels: CPUID for the instructions, XGETBV for whether the
// system saves the registers they use.
#pragma once

namespace smoe {

struct CpuFeatures {
  bool avx2 = false;     // AVX2, FMA and F16C, and the system saves the 256-bit registers
  bool dotprod = false;  // Arm: the dot product instructions
  bool avx512 = false;   // AVX-512 F BW VL DQ and VNNI besides, and the system saves the 512-bit and mask registers
};
const CpuFeatures& cpu_features();

}  // namespace smoe
