// Every ISA this processor supports against scalar and against the definition.
#include <cmath>

#include "check.h"
#include "kernels/kernels.h"

using namespace smoe;

TEST(kernels_registry) {
  REQUIRE(choose_kernels("auto").is_ok());
  REQUIRE(choose_kernels("scalar").is_ok());
  CHECK_EQ(std::string((*choose_kernels("scalar"))->name), "scalar");
  CHECK(choose_kernels("z80").status().code() == Code::usage);
  CHECK(choose_kernels("z80").status().hint().find("scalar") != std::string::npos);
  for (const Kernels* k : all_kernels()) CHECK(!k->supported() || k->rank <= (*choose_kernels("auto"))->rank);
}
