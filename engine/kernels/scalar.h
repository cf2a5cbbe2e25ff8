// The scalar table, for the layouts that a faster ISA leaves to it (quantised matrices in rows layout). Private to
// engine/kernels.
#pragma once

#include "kernels/kernels.h"

namespace smoe {

const Kernels& scalar_kernels();

}  // namespace smoe
