// The buffer type that weights are packed into.
#pragma once

#include "ggml_abi.h"

namespace ls {

// The one instance. Its device is set when the plug-in registers.
BufferType *weights_buffer_type();

// Whether the tensor lies in a buffer of that type.
bool in_weights_buffer(const Tensor *t);

// Whether a weight matrix of this type and shape is multiplied by us.
bool can_multiply(const Tensor *weights);

}  // namespace ls
