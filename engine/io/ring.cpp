#include "io/ring.h"

#ifdef SMOE_HAVE_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

namespace smoe {
namespace {

// The kernel is the other side of these words.
uint32_t load(uint32_t* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); }
void store(uint32_t* word, uint32_t value) { std::atomic_ref(*word).store(value, std::memory_order_release); }

int setup(uint32_t entries, uint32_t flags, io_uring_params* params) {
  *params = {};
  params->flags = flags;
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, params));
}

}  // namespace

Ring::~Ring() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (ring_ != nullptr) munmap(ring_, ring_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status Ring::open(uint32_t entries) {
  // A finished read is taken in when this thread next enters the kernel anyway, instead of by an interruption of what
  // it computes. Any thread may use the ring, one at a time, so it is not made for a single one.
  io_uring_params params;
  fd_ = setup(entries, IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, &params);
  if (fd_ < 0 && errno == EINVAL) fd_ = setup(entries, 0, &params);
  if (fd_ < 0) return {Code::io, std::string("no io_uring here: ") + std::strerror(errno)};
  if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_NODROP)) {
    return {Code::io, "no io_uring here: this kernel's is too old"};
  }
  return map(params);
}

Status Ring::map(const io_uring_params& p) {
  const auto mapped = [&](uint64_t bytes, off_t at) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, at);
    return memory == MAP_FAILED ? nullptr : memory;
  };
  ring_bytes_ = std::max<uint64_t>(p.sq_off.array + p.sq_entries * sizeof(uint32_t),
                                   p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
  ring_ = mapped(ring_bytes_, IORING_OFF_SQ_RING);
  entries_ = ring_ == nullptr ? nullptr : mapped(entries_bytes_, IORING_OFF_SQES);
  if (entries_ == nullptr) return {Code::io, std::string("no io_uring here: ") + std::strerror(errno)};
  const auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(static_cast<char*>(ring_) + offset); };
  sq_head_ = word(p.sq_off.head);
  sq_tail_ = word(p.sq_off.tail);
  sq_flags_ = word(p.sq_off.flags);
  cq_head_ = word(p.cq_off.head);
  cq_tail_ = word(p.cq_off.tail);
  sq_count_ = p.sq_entries;
  cq_mask_ = *word(p.cq_off.ring_mask);
  sqes_ = static_cast<io_uring_sqe*>(entries_);
  cqes_ = reinterpret_cast<io_uring_cqe*>(word(p.cq_off.cqes));
  for (uint32_t i = 0; i < sq_count_; ++i) word(p.sq_off.array)[i] = i;  // entries are used in order, always
  return Status::ok();
}

io_uring_sqe* Ring::next() {
  const uint32_t tail = load(sq_tail_);
  if (tail - load(sq_head_) == sq_count_) return nullptr;
  io_uring_sqe* entry = &sqes_[tail % sq_count_];
  std::memset(entry, 0, sizeof *entry);
  // Published at once, read by the kernel only in enter(): without a polling kernel thread nothing reads it before.
  store(sq_tail_, tail + 1);
  ++unsent_;
  return entry;
}

int Ring::enter(bool wait) {
  const uint32_t flags = wait || (load(sq_flags_) & IORING_SQ_TASKRUN) ? IORING_ENTER_GETEVENTS : 0;
  const auto sent = syscall(__NR_io_uring_enter, fd_, unsent_, wait ? 1 : 0, flags, nullptr, 0);
  if (sent < 0) return errno;
  unsent_ -= std::min(unsent_, static_cast<uint32_t>(sent));
  return 0;
}

bool Ring::pop(io_uring_cqe* out) {
  const uint32_t head = *cq_head_;
  if (head == load(cq_tail_)) return false;
  std::memcpy(out, &cqes_[head & cq_mask_], sizeof *out);
  store(cq_head_, head + 1);
  return true;
}

bool Ring::take(io_uring_cqe* out) {
  if (pop(out)) return true;
  if (!(load(sq_flags_) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW))) return false;
  (void)syscall(__NR_io_uring_enter, fd_, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
  return pop(out);
}

int Ring::register_file(int fd) {
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_FILES, &fd, 1) < 0 ? errno : 0;
}

int Ring::reserve_buffers(uint32_t count) {
  io_uring_rsrc_register table{};
  table.nr = count;
  table.flags = IORING_RSRC_REGISTER_SPARSE;
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS2, &table, sizeof table) < 0 ? errno : 0;
}

int Ring::set_buffer(uint32_t index, void* memory, uint64_t bytes) {
  const iovec place{memory, memory == nullptr ? 0 : bytes};
  io_uring_rsrc_update2 update{};
  update.offset = index;
  update.data = reinterpret_cast<uint64_t>(&place);
  update.nr = 1;
  return syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0 ? errno : 0;
}

}  // namespace smoe

#endif
