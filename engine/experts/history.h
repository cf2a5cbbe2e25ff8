// How often each expert was used, kept from one process to the next in a small file beside the vault or wherever the
// launcher says. Written whole under another name and renamed, so that a reader, and a second writer, meet a whole
// file.
//
// The file: the 8 bytes "SMOEUSED", the SHA-256 of the vault's manifest as 64 lower-case hexadecimal digits, a
// little-endian u32 number of records, one f32 decayed count for each (experts/usage.h; halved every kHistoryHalfLife
// tokens), and a u32 CRC-32C of all before it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smoe/status.h"

namespace smoe {

// What a file of another vault must not be taken for: the manifest names every tensor and its checksum.
std::string history_fingerprint(const std::string& manifest_json);

// Counts [record] of this vault. Empty, and ok: there is no file, or it belongs to another vault. Errors:
// Code::corrupt, Code::io, naming the path; none of them is a reason not to run.
Result<std::vector<float>> read_history(const std::string& path, const std::string& fingerprint, uint32_t records);
Status write_history(const std::string& path, const std::string& fingerprint, const std::vector<float>& counts);

}  // namespace smoe
