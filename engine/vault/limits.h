// The largest numbers a manifest may hold: far above every model there is, and small enough that no product of them
// that the engine forms overflows 64 bits. (Largest matrix: kVocab x kHidden x 4 bytes = 2^41. All records:
// kTotalExperts of 3 x kWidth x kHidden x 4 bytes, below 2^61.)
#pragma once

#include <cstdint>

namespace smoe::limits {

inline constexpr uint32_t kHidden = 1u << 17;
inline constexpr uint32_t kVocab = 1u << 22;
inline constexpr uint32_t kLayers = 4096;
inline constexpr uint32_t kHeads = 4096;
inline constexpr uint32_t kHeadDim = 1u << 12;  // heads * head_dim <= 2^24
inline constexpr uint32_t kWidth = 1u << 20;
inline constexpr uint32_t kExperts = 1u << 16;
inline constexpr uint64_t kTotalExperts = 1u << 20;
inline constexpr uint32_t kPositions = 1u << 28;
inline constexpr uint32_t kRopes = 64;
inline constexpr uint32_t kChannels = 1u << 20;  // of a recurrent layer

}  // namespace smoe::limits
