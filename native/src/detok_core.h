/* What the files of the decoder core share. */
#ifndef SHMRING_DETOK_CORE_H
#define SHMRING_DETOK_CORE_H

#include "shmring/detok.h"

#define DETOK_REPLACEMENT_LENGTH 3u /* U+FFFD in UTF-8 */

/* Writes what one id adds to the text of `state`; returns the end of what was written. */
uint8_t *detok_say_id(const struct detok_table *table, struct detok_state *state, int32_t id, uint8_t *out);

/* The most bytes that detok_say_id can write for this id, whatever the state holds. */
uint64_t detok_id_bound(const struct detok_table *table, int32_t id);

#endif
