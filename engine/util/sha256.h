// SHA-256 (FIPS 180-4), for the tokenizer files whose digests the manifest lists.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace smoe {

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  std::string hex();  // of everything so far, 64 lower-case digits; ends the use of this object

 private:
  void block(const uint8_t* p);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  uint64_t bytes_ = 0;
};

}  // namespace smoe
