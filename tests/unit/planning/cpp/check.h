// What the tests of the searcher end with where something does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(...)                                                              \
    do {                                                                        \
        if (!(__VA_ARGS__)) {                                                   \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)
