// The attribute that exports the functions of the C interface.
#pragma once

#include <cstdint>

#define VISION_TTT_EXPORT __attribute__((visibility("default")))
