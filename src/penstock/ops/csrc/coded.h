// A product of activations with quantized panels, as ops/coded_cpu.py asks for it in one block of bytes.
#pragma once

#include <cstdint>

struct Matrix {
    const uint8_t *codes, *scales;
    const float* gains;  // a factor of each row of the matrix, or null
    // group: blocks that share a scale. offset: what the codes are above their numbers, BIAS included. Of FP8, group is the scales
    // of a row, offset the columns of x that share one, or 0: x is taken as it is.
    int64_t n, k, group, offset;
};

struct CodedCall {
    const void* x;
    int64_t ldx;
    Matrix matrix;
    int64_t bits, kind;
    const float* fixed;
    const void* bias;
    void* out;
    int64_t rows, dtype;  // dtype + 256: float32 results
};

// Products of `number` matrices of one shape and scheme, each with rows of its own.
extern "C" __attribute__((visibility("default"))) void penstock_coded(const CodedCall* calls, int64_t number);

// In linear.cpp: of FP8 weights.
void fp8_product(const CodedCall& c);
