// A disk with faults, put under the engine by LD_PRELOAD: pread of direct descriptors fails, is cut short or is late, as
// FAULTY_DISK says: "eio" (every read), "eio-once", "short", "slow" (5 ms a read). Begins when the file FAULTY_SWITCH
// exists.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*pread_t)(int, void*, size_t, off_t);

static atomic_int failed;

static ssize_t faulty(const char* name, int fd, void* buffer, size_t length, off_t offset) {
  pread_t real = (pread_t)dlsym(RTLD_NEXT, name);
  const char *how = getenv("FAULTY_DISK"), *on = getenv("FAULTY_SWITCH");
  const int flags = fcntl(fd, F_GETFL);
  if (!how || !on || flags < 0 || !(flags & O_DIRECT) || length < 16384 || access(on, F_OK) != 0) {
    return real(fd, buffer, length, offset);
  }
  if (strcmp(how, "eio") == 0 || (strcmp(how, "eio-once") == 0 && atomic_exchange(&failed, 1) == 0)) {
    errno = EIO;
    return -1;
  }
  if (strcmp(how, "slow") == 0) usleep(5000);
  if (strcmp(how, "short") == 0) length = (length / 3 + 4095) / 4096 * 4096;
  return real(fd, buffer, length, offset);
}

ssize_t pread(int fd, void* buffer, size_t length, off_t offset) { return faulty("pread", fd, buffer, length, offset); }
ssize_t pread64(int fd, void* buffer, size_t length, off_t offset) {
  return faulty("pread64", fd, buffer, length, offset);
}
