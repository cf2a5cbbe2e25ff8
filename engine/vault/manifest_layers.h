// The layers of a manifest: attention and feed-forward blocks as numbers, range-checked.
#pragma once

#include <string_view>

#include "smoe/model.h"
#include "util/fields.h"

namespace smoe {

Status read_encoding(const Fields& fields, std::string_view key, Encoding* out);
// Reads arch.layers into m->layers; arch.hidden and arch.ropes have been read.
Status read_layers(const Fields& arch, ModelSpec* m);

}  // namespace smoe
