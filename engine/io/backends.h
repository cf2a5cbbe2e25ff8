// The backends behind open_reader().
#pragma once

#include <memory>

#include "io/record_file.h"

namespace smoe {

// Errors: Code::usage for no workers.
Result<std::unique_ptr<Reader>> open_pread_reader(std::unique_ptr<RecordFile> file, uint32_t workers);
// Takes the file only if it succeeds. Errors: Code::io where there is no io_uring, or it does not read.
Result<std::unique_ptr<Reader>> open_uring_reader(std::unique_ptr<RecordFile>& file, const SlotMemory& slots);

}  // namespace smoe
