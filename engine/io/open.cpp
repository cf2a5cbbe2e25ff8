// Chooses the backend.
#include "io/backends.h"
#include "io/reader.h"

namespace smoe {

Result<std::unique_ptr<Reader>> open_reader(const std::string& path, const ReaderOptions& options,
                                            std::vector<std::string>* notices) {
  const auto tell = [&](std::string text) {
    if (notices != nullptr && !text.empty()) notices->push_back(std::move(text));
  };
  std::string notice;
  SMOE_ASSIGN(std::unique_ptr<RecordFile> file, RecordFile::open(path, options.mode, &notice));
  tell(std::move(notice));
  if (options.kind == ReaderKind::pread) return open_pread_reader(std::move(file), options.workers);
  Result<std::unique_ptr<Reader>> uring = open_uring_reader(file, options.slots);
  if (uring.is_ok()) return uring;
  if (options.kind == ReaderKind::uring) {
    return Status(uring.status().code(), uring.status().message(), "leave --io out, or use --io pread");
  }
  tell(uring.status().message() + "; reading with a pool of threads instead");
  return open_pread_reader(std::move(file), options.workers);
}

}  // namespace smoe
