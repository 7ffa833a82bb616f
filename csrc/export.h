// What the functions of the C interface are declared with.
#pragma once

#include <cstdint>

#define VISION_TTT_EXPORT __attribute__((visibility("default")))
