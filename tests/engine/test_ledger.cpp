#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <optional>
#include <thread>

#include "check.h"
#include "fake_tree.h"
#include "util/cgroup.h"
#include "util/ledger.h"

using namespace smoe;

namespace {

// A child process that reserves `bytes` and then lives until end().
struct OtherEngine {
  OtherEngine(const std::string& path, uint64_t bytes) {
    int ready[2];
    if (pipe(ready) != 0) return;
    pid = fork();
    if (pid == 0) {
      {
        Result<Ledger> ledger = Ledger::open(path);
        const char ok = ledger.is_ok() && ledger->reserve(bytes).is_ok() ? 1 : 0;
        if (write(ready[1], &ok, 1) != 1) _exit(1);
      }
      for (;;) pause();
    }
    char ok = 0;
    reserved = read(ready[0], &ok, 1) == 1 && ok == 1;
    close(ready[0]);
    close(ready[1]);
  }
  void end() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    pid = -1;
  }
  ~OtherEngine() { end(); }
  pid_t pid = -1;
  bool reserved = false;
};

uint64_t others(const std::string& path) {
  Result<Ledger> ledger = Ledger::open(path);
  return ledger.is_ok() ? ledger->reserved_by_others() : UINT64_MAX;
}

}  // namespace

TEST(ledger_counts_the_living_others) {
  FakeTree tree;
  const std::string path = tree.path("engines");
  CHECK_EQ(others(path), 0u);
  OtherEngine first(path, 1000), second(path, 200);
  REQUIRE(first.reserved && second.reserved);
  CHECK_EQ(others(path), 1200u);
  {
    Result<Ledger> own = Ledger::open(path);
    REQUIRE(own.is_ok());
    CHECK(own->reserve(7).is_ok());
  }
  CHECK_EQ(others(path), 1200u);  // one's own is not another's
  std::string text;
  CHECK(read_small_file(path, &text) && text.find(std::to_string(getpid()) + " ") != std::string::npos);
  first.end();
  CHECK_EQ(others(path), 200u);
  {
    Result<Ledger> own = Ledger::open(path);
    REQUIRE(own.is_ok());
    CHECK(own->reserve(0).is_ok());
  }
  CHECK(read_small_file(path, &text) && std::count(text.begin(), text.end(), '\n') == 1);  // the dead one is gone too
}

TEST(ledger_survives_rubbish_and_reused_pids) {
  FakeTree tree;
  // pid 1 lives, but did not start at that time; the rest is no entry.
  tree.write("engines", "1 999999999999 500\nrubbish\n12\n-4 0 5\n1 2");
  CHECK_EQ(others(tree.path("engines")), 0u);
  CHECK(Ledger::open(tree.path("no/such/folder")).status().code() == Code::io);
}

// The lock belongs to an opening of the file, so a thread stands for another process here.
TEST(ledger_is_locked_while_open) {
  FakeTree tree;
  const std::string path = tree.path("engines");
  std::optional<Ledger> held(std::move(Ledger::open(path)).value());
  std::atomic<bool> entered{false};
  std::thread waits([&] {
    Result<Ledger> second = Ledger::open(path);
    entered = second.is_ok();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!entered.load());
  held.reset();
  waits.join();
  CHECK(entered.load());
}
