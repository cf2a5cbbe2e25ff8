// CRC-32C (Castagnoli), the checksum of every part of a vault; hardware where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smoe {

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace smoe
