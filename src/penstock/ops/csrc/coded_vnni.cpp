// Quantized GEMMs for CPUs with AVX-512 VNNI; coded.cpp selects them at run time.
#if defined(__AVX512F__)
#pragma GCC target("avx512vnni")
#define CODED_VNNI
#include "coded.h"

void run_coded_vnni(const void* call) { run(*(const CodedCall*)call); }
#endif
