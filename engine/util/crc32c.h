// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78). crc32c("123456789") == 0xE3069283; the result of one piece is
// the `crc` of the next.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smoe {

// Uses the CPU's instruction where there is one.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);

// The table version, for CPUs without the instruction and as the truth the fast one is tested against.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace smoe
