// An io_uring by raw system calls, as far as reading one file needs it: submission in batches, completions taken from
// shared memory. Single-threaded use. Source: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#pragma once

#include <cstdint>

#include "smoe/status.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#if defined(IORING_SETUP_TASKRUN_FLAG) && defined(IORING_RSRC_REGISTER_SPARSE)
#define SMOE_HAVE_URING 1
#endif
#endif

#ifdef SMOE_HAVE_URING

namespace smoe {

class Ring {
 public:
  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Errors: Code::io with the system's word for it (ENOSYS, EPERM under seccomp, ENOMEM).
  Status open(uint32_t entries);

  // An empty entry to fill in; null if the submission queue is full.
  io_uring_sqe* next();
  // Hands what next() gave out since to the kernel and, with `wait`, sleeps until a completion is there. 0 or errno.
  // What a failed call did not hand over is handed over by the next one.
  int enter(bool wait);
  bool has_unsent() const { return unsent_ > 0; }

  // The oldest completion in shared memory; false if there is none. Enters the kernel only where the kernel says that
  // it keeps finished reads back until this thread comes by.
  bool take(io_uring_cqe* out);

  // 0 or errno.
  int register_file(int fd);
  int reserve_buffers(uint32_t count);                           // a table of empty places
  int set_buffer(uint32_t index, void* memory, uint64_t bytes);  // null empties the place

 private:
  Status map(const io_uring_params& params);
  bool pop(io_uring_cqe* out);

  int fd_ = -1;
  void *ring_ = nullptr, *entries_ = nullptr;
  uint64_t ring_bytes_ = 0, entries_bytes_ = 0;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_flags_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_count_ = 0, cq_mask_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint32_t unsent_ = 0;  // given out by next() and not yet the kernel's
};

}  // namespace smoe

#endif
