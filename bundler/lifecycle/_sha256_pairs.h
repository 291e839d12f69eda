/* SPDX-License-Identifier: Apache-2.0
 *
 * `hash_pairs`: SHA-256 of many files, two at a time, by the processor's own instructions.
 * _sha256.h, which alone includes this file, asks `can_hash_pairs` first, and leaves everything to
 * OpenSSL where the answer is no.
 *
 * Each of these instructions waits for the one before it, four cycles, and another could begin
 * every second one: so a second file, which waits for nothing of the first, is hashed in the gaps.
 * OpenSSL takes one file at a time. FIPS 180-4 has the algorithm.  Everything lies on the caller's
 * stack; any thread may call.
 */

#ifndef BUNDLER_SHA256_PAIRS_H
#define BUNDLER_SHA256_PAIRS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DIGEST_BYTES 32

/* Bytes to hash, and where their digest goes. */
typedef struct {
  const void *data;
  size_t size;
  unsigned char *digest;
} hashing_t;

/* Fills in what to hash next; returns 0 when there is nothing left. */
typedef int (*next_hashing_t)(void *state, hashing_t *hashing);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(BUNDLER_OPENSSL_ONLY)
#include <cpuid.h>
#include <immintrin.h>

#define BLOCK_BYTES 64
#define WITH_SHA __attribute__((target("sha,sse4.1,ssse3")))

static const uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* One file on its way; the state is in the order that the instructions take: words a, b, e, f and
 * c, d, g, h. */
typedef struct {
  __m128i abef, cdgh;
  const unsigned char *at;
  size_t blocks; /* to be hashed from `at` on */
  hashing_t of;
  int in_tail;
  unsigned char tail[2 * BLOCK_BYTES]; /* what is left of the file, and its length */
} lane_t;

static int can_hash_pairs(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
    return 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

/* Hashes one block in each of the first `lanes`: 1 or 2, known when this is compiled. */
WITH_SHA static inline __attribute__((always_inline)) void hash_blocks(lane_t *const *lane,
                                                                       const int lanes) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i abef[2], cdgh[2], words[2][4];
  for (int n = 0; n < lanes; n++) {
    abef[n] = lane[n]->abef;
    cdgh[n] = lane[n]->cdgh;
  }
#pragma GCC unroll 16
  for (int group = 0; group < 16; group++) {
    const __m128i constants = _mm_loadu_si128((const __m128i *)&ROUND_CONSTANTS[4 * group]);
#pragma GCC unroll 2
    for (int n = 0; n < lanes; n++) {
      __m128i *now = &words[n][group % 4];
      if (group < 4)
        *now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(lane[n]->at + 16 * group)), swap);
      else {
        const __m128i before = words[n][(group + 3) % 4];
        const __m128i shifted = _mm_alignr_epi8(before, words[n][(group + 2) % 4], 4);
        *now = _mm_sha256msg2_epu32(
            _mm_add_epi32(_mm_sha256msg1_epu32(*now, words[n][(group + 1) % 4]), shifted), before);
      }
      const __m128i four = _mm_add_epi32(*now, constants);
      cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], four);
      abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(four, 0x0e));
    }
  }
  for (int n = 0; n < lanes; n++) {
    lane[n]->abef = _mm_add_epi32(lane[n]->abef, abef[n]);
    lane[n]->cdgh = _mm_add_epi32(lane[n]->cdgh, cdgh[n]);
    lane[n]->at += BLOCK_BYTES;
    lane[n]->blocks--;
  }
}

WITH_SHA static void hash_one_lane(lane_t *one) {
  while (one->blocks > 0)
    hash_blocks(&one, 1);
}

/* Until one of them is at its end. */
WITH_SHA static void hash_two_lanes(lane_t *one, lane_t *two) {
  lane_t *const both[2] = {one, two};
  while (one->blocks > 0 && two->blocks > 0)
    hash_blocks(both, 2);
}

static void begin_lane(lane_t *lane) {
  lane->abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c);
  lane->cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);
  lane->at = lane->of.data;
  lane->blocks = lane->of.size / BLOCK_BYTES;
  lane->in_tail = 0;
}

/* Behind the file come a bit, zeros to the end of a block but eight bytes, and the number of its
 * bits. */
static void begin_tail(lane_t *lane) {
  size_t left = lane->of.size % BLOCK_BYTES,
         end = left + 9 <= BLOCK_BYTES ? BLOCK_BYTES : 2 * BLOCK_BYTES;
  uint64_t bits = (uint64_t)lane->of.size * 8;
  memset(lane->tail, 0, sizeof(lane->tail));
  if (left > 0)
    memcpy(lane->tail, (const unsigned char *)lane->of.data + (lane->of.size - left), left);
  lane->tail[left] = 0x80;
  for (size_t byte = 1; byte <= 8; byte++, bits >>= 8)
    lane->tail[end - byte] = (unsigned char)bits;
  lane->at = lane->tail;
  lane->blocks = end / BLOCK_BYTES;
  lane->in_tail = 1;
}

static void put_digest(const lane_t *lane) {
  /* From the highest of four words to the lowest, those of each register are a, b, e, f and c, d,
   * g, h. */
  static const int PLACES[2][4] = {{5, 4, 1, 0}, {7, 6, 3, 2}};
  uint32_t words[2][4];
  memcpy(words[0], &lane->abef, sizeof(words[0]));
  memcpy(words[1], &lane->cdgh, sizeof(words[1]));
  for (int half = 0; half < 2; half++)
    for (int word = 0; word < 4; word++)
      for (int byte = 0; byte < 4; byte++)
        lane->of.digest[4 * PLACES[half][word] + byte] =
            (unsigned char)(words[half][word] >> (24 - 8 * byte));
}

/* Brings a lane that is at its end to the next blocks, of its file or of the next one; returns 0
 * when there is no other. */
static int advance(lane_t *lane, int *busy, next_hashing_t next, void *state) {
  while (*busy && lane->blocks == 0) {
    if (!lane->in_tail)
      begin_tail(lane);
    else {
      put_digest(lane);
      *busy = next(state, &lane->of);
      if (*busy)
        begin_lane(lane);
    }
  }
  return *busy;
}

static void hash_pairs(next_hashing_t next, void *state) {
  lane_t lane[2];
  int busy[2];
  for (int n = 0; n < 2; n++)
    if ((busy[n] = next(state, &lane[n].of)))
      begin_lane(&lane[n]);
  for (;;) {
    int one = advance(&lane[0], &busy[0], next, state),
        two = advance(&lane[1], &busy[1], next, state);
    if (one && two)
      hash_two_lanes(&lane[0], &lane[1]);
    else if (one || two)
      hash_one_lane(one ? &lane[0] : &lane[1]);
    else
      return;
  }
}

#else

static int can_hash_pairs(void) { return 0; }

static void hash_pairs(next_hashing_t next, void *state) {
  (void)next;
  (void)state;
}

#endif
#endif
