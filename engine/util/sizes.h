// Bytes for a person: "812 B", "46.4 GB", in powers of 1024, as the command line writes and reads them.
#pragma once

#include <cstdint>
#include <string>

namespace smoe {

std::string show_bytes(uint64_t bytes);

}  // namespace smoe
