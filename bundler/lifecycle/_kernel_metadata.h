/* SPDX-License-Identifier: Apache-2.0
 *
 * `is_readable_head`: whether Triton could surely read a kernel of this metadata JSON.
 * _kernel_writer.c, which alone includes this file, asks before it writes one, in threads without
 * an interpreter.  Nothing is allocated.
 *
 * bundler/format/metadata.py has the same in Python.  A yes here is a yes there; a no says nothing,
 * and Python looks again: this reads what Triton writes, and leaves escapes and everything unusual
 * to a real parser.
 */

#ifndef BUNDLER_KERNEL_METADATA_H
#define BUNDLER_KERNEL_METADATA_H

#include "_sha256.h"

/* As METADATA_DEPTH and _HEAD_BYTES of bundler/format/metadata.py: so few brackets cannot nest
 * deeper, and no number is too long for Python. */
#define MOST_BRACKETS 32
#define MOST_HEAD_BYTES 4096
/* A number of so few digits is one of 64 bits. */
#define MOST_DIGITS 18

typedef struct {
  const char *start;
  size_t size;
} text_t;

/* What is read so far; the first thing that is out of the ordinary ends it. */
typedef struct {
  const char *at, *end;
  int brackets;
} json_t;

/* What a head has to have; a member that occurs twice is out of the ordinary. */
typedef struct {
  text_t hash, name, backend;
  int shared, num_warps, target, arch, warp_size;
} head_t;

typedef enum { NOTHING, TEXT, WHOLE_NUMBER, OTHER } json_kind_t;

static void skip_spaces(json_t *json) {
  while (json->at < json->end &&
         (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
    json->at++;
}

static int take(json_t *json, char expected) {
  skip_spaces(json);
  if (json->at == json->end || *json->at != expected)
    return 0;
  json->at++;
  return 1;
}

static int is_next(json_t *json, char one, char other) {
  int found = json->at < json->end && (*json->at == one || *json->at == other);
  json->at += found;
  return found;
}

/* A text of printable ASCII characters without escapes. */
static int take_text(json_t *json, text_t *text) {
  if (!take(json, '"'))
    return 0;
  text->start = json->at;
  while (json->at < json->end && *json->at >= ' ' && *json->at <= '~' && *json->at != '"' &&
         *json->at != '\\')
    json->at++;
  text->size = (size_t)(json->at - text->start);
  return is_next(json, '"', '"');
}

static int take_digits(json_t *json) {
  const char *first = json->at;
  while (json->at < json->end && *json->at >= '0' && *json->at <= '9')
    json->at++;
  return (int)(json->at - first);
}

static json_kind_t take_number(json_t *json) {
  is_next(json, '-', '-');
  int leads_with_zero = json->at < json->end && *json->at == '0', digits = take_digits(json);
  json_kind_t kind = digits <= MOST_DIGITS ? WHOLE_NUMBER : OTHER;
  if (digits == 0 || (leads_with_zero && digits > 1))
    return NOTHING;
  if (is_next(json, '.', '.')) {
    kind = OTHER;
    if (take_digits(json) == 0)
      return NOTHING;
  }
  if (is_next(json, 'e', 'E')) {
    kind = OTHER;
    is_next(json, '+', '-');
    if (take_digits(json) == 0)
      return NOTHING;
  }
  return kind;
}

static int take_word(json_t *json, const char *word) {
  size_t size = strlen(word);
  if ((size_t)(json->end - json->at) < size || memcmp(json->at, word, size) != 0)
    return 0;
  json->at += size;
  return 1;
}

static json_kind_t take_value(json_t *json, text_t *text);

/* Reads members, or items without names, up to the bracket that closes them. */
static int take_rest(json_t *json, char closing) {
  text_t name, text;
  if (++json->brackets > MOST_BRACKETS)
    return 0;
  if (take(json, closing))
    return 1;
  do {
    if ((closing == '}' && !(take_text(json, &name) && take(json, ':'))) ||
        take_value(json, &text) == NOTHING)
      return 0;
  } while (take(json, ','));
  return take(json, closing);
}

static json_kind_t take_value(json_t *json, text_t *text) {
  skip_spaces(json);
  switch (json->at < json->end ? *json->at : 0) {
  case '"':
    return take_text(json, text) ? TEXT : NOTHING;
  case '{':
    json->at++;
    return take_rest(json, '}') ? OTHER : NOTHING;
  case '[':
    json->at++;
    return take_rest(json, ']') ? OTHER : NOTHING;
  case 't':
    return take_word(json, "true") ? OTHER : NOTHING;
  case 'f':
    return take_word(json, "false") ? OTHER : NOTHING;
  case 'n':
    return take_word(json, "null") ? OTHER : NOTHING;
  default:
    return take_number(json);
  }
}

static int is_text(const text_t *text, const char *expected) {
  return text->size == strlen(expected) && memcmp(text->start, expected, text->size) == 0;
}

/* Notes a member that has to be there once and of one kind. */
static int note(int *there, json_kind_t kind, json_kind_t expected) {
  if (*there || kind != expected)
    return 0;
  *there = 1;
  return 1;
}

static int note_text(text_t *member, json_kind_t kind, const text_t *text) {
  if (member->start != NULL || kind != TEXT)
    return 0;
  *member = *text;
  return 1;
}

/* Returns 0 for a member that is not as it has to be; others are let pass. */
static int note_member(head_t *head, int of_target, const text_t *name, json_kind_t kind,
                       const text_t *text) {
  if (of_target) {
    if (is_text(name, "backend"))
      return note_text(&head->backend, kind, text);
    if (is_text(name, "arch"))
      return note(&head->arch, kind == TEXT ? WHOLE_NUMBER : kind, WHOLE_NUMBER);
    return !is_text(name, "warp_size") || note(&head->warp_size, kind, WHOLE_NUMBER);
  }
  if (is_text(name, "hash"))
    return note_text(&head->hash, kind, text);
  if (is_text(name, "name"))
    return note_text(&head->name, kind, text);
  if (is_text(name, "shared"))
    return note(&head->shared, kind, WHOLE_NUMBER);
  return !is_text(name, "num_warps") || note(&head->num_warps, kind, WHOLE_NUMBER);
}

/* Reads the members of the whole, or of the target in it, whose bracket was read. */
static int take_members(json_t *json, head_t *head, int of_target) {
  text_t name, text;
  if (++json->brackets > MOST_BRACKETS)
    return 0;
  do {
    if (!take_text(json, &name) || !take(json, ':'))
      return 0;
    if (!of_target && is_text(&name, "target")) {
      if (!note(&head->target, OTHER, OTHER) || !take(json, '{') || !take_members(json, head, 1))
        return 0;
    } else {
      json_kind_t kind = take_value(json, &text);
      if (kind == NOTHING || !note_member(head, of_target, &name, kind, &text))
        return 0;
    }
  } while (take(json, ','));
  return take(json, '}');
}

static int read_head(json_t *json, head_t *head) {
  if (!take(json, '{') || !take_members(json, head, 0))
    return 0;
  skip_spaces(json);
  return json->at == json->end && head->hash.start != NULL && head->name.start != NULL &&
         head->backend.start != NULL && head->shared && head->num_warps && head->target &&
         head->arch && head->warp_size;
}

static int digit_of(char character) {
  if (character >= '0' && character <= '9')
    return character - '0';
  if (character >= 'a' && character <= 'f')
    return character - 'a' + 10;
  return character >= 'A' && character <= 'F' ? character - 'A' + 10 : -1;
}

/* Whether a kernel key is the name, in base32 without padding or in hex, of a SHA-256 that is given
 * in hex. */
static int is_key_of(const char *key, const text_t *hash) {
  static const char BASE32[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", HEX[] = "0123456789abcdef";
  unsigned char digest[DIGEST_BYTES];
  size_t size = strlen(key), bits = size == 52 ? 5 : 4;
  unsigned left = 0, number = 0;
  if (hash->size != 2 * DIGEST_BYTES || (size != 52 && size != 2 * DIGEST_BYTES))
    return 0;
  for (size_t byte = 0; byte < DIGEST_BYTES; byte++) {
    int high = digit_of(hash->start[2 * byte]), low = digit_of(hash->start[2 * byte + 1]);
    if (high < 0 || low < 0)
      return 0;
    digest[byte] = (unsigned char)(high << 4 | low);
  }
  for (size_t place = 0, byte = 0; place < size; place++) {
    if (left < bits) {
      number = number << 8 | (byte < DIGEST_BYTES ? digest[byte] : 0);
      byte++;
      left += 8;
    }
    left -= (unsigned)bits;
    unsigned digit = number >> left & ((1u << bits) - 1);
    if (key[place] != (bits == 5 ? BASE32[digit] : HEX[digit]))
      return 0;
  }
  return 1;
}

/* Whether the binary is of the kind that the backend makes; of an unknown one nothing is known. */
static int is_binary_of(const text_t *backend, const char *binary) {
  static const char *const KINDS[][2] = {{"cuda", ".cubin"}, {"hip", ".hsaco"}, {"xpu", ".zebin"}};
  for (size_t number = 0; number < sizeof(KINDS) / sizeof(KINDS[0]); number++)
    if (is_text(backend, KINDS[number][0])) {
      size_t size = strlen(binary), suffix = strlen(KINDS[number][1]);
      return size >= suffix && strcmp(binary + size - suffix, KINDS[number][1]) == 0;
    }
  return 1;
}

/* `key` is the name of the kernel's directory, `binary` that of its device binary. */
static int is_readable_head(const char *data, size_t size, const char *key, const char *binary) {
  json_t json = {data, data + size, 0};
  head_t head = {0};
  return size <= MOST_HEAD_BYTES && read_head(&json, &head) && is_key_of(key, &head.hash) &&
         is_binary_of(&head.backend, binary);
}

#endif
