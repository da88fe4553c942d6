// Which instruction set a *_kernels.cpp is being compiled for. Everything in such a file stands in namespace ISA, so
// that no inline function of one set can be linked in place of another's.
#pragma once

#if defined(MAGICDEC_AVX512)
#define ISA avx512
#elif defined(MAGICDEC_AVX2)
#define ISA avx2
#elif defined(MAGICDEC_PORTABLE)
#define ISA portable
#else
#error "compile *_kernels.cpp with MAGICDEC_AVX512, MAGICDEC_AVX2 or MAGICDEC_PORTABLE"
#endif

#if defined(MAGICDEC_AVX512) || defined(MAGICDEC_AVX2)
#include <immintrin.h>
#endif
