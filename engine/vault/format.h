// The bytes of a .smoe outside its records: header and expert table. vault/FORMAT.md describes them in prose.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "experts/cache.h"
#include "smoe/model.h"
#include "smoe/status.h"

namespace smoe::format {

inline constexpr uint64_t kHeaderBytes = 4096;
inline constexpr uint64_t kRecordsOffset = 16384;
inline constexpr uint64_t kEntryBytes = 32;
inline constexpr uint64_t kMaxManifestBytes = uint64_t{64} << 20;
inline constexpr uint64_t kMaxScoutHeaderBytes = uint64_t{64} << 20;
static_assert(kRecordsOffset % kRecordAlignment == 0);

struct Header {
  uint64_t file_bytes = 0;
  uint64_t records_bytes = 0;
  uint64_t table_offset = 0, table_bytes = 0;
  uint64_t manifest_offset = 0, manifest_bytes = 0;
  uint32_t table_crc = 0, manifest_crc = 0;
  uint64_t expert_count = 0;
  uint32_t moe_layers = 0;
};

using HeaderBytes = std::array<uint8_t, kHeaderBytes>;
HeaderBytes encode_header(const Header& h);
// Checks magic, version, checksum and that the parts follow each other without gaps up to `file_bytes`.
Result<Header> decode_header(const HeaderBytes& bytes, uint64_t file_bytes);

// records[moe layer][expert]; layers: the absolute numbers of the MoE layers.
std::vector<uint8_t> encode_table(const std::vector<std::vector<ExpertRecord>>& records,
                                  const std::vector<uint32_t>& layers);
// Checks that every entry is what the model says: order, length, no gaps, from kRecordsOffset to h.table_offset.
Result<std::vector<std::vector<ExpertRecord>>> decode_table(const std::vector<uint8_t>& bytes, const Header& h,
                                                            const ModelSpec& model);

}  // namespace smoe::format
