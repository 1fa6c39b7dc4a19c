/* What dispatcher.pml is held to: functions of its variables that change none of them. */

/* The version of a field that program order gives to kernel `kind` of a tile; for KINDS, the one at the end. */
inline version_for(tile, kind, field) {
  right = 0;
  k = 0;
  do
  :: k < (kind) ->
     if
     :: (WRITES(k) & BIT(field)) && (allowed & BIT((tile) * KINDS + k)) -> right = (tile) * KINDS + k + 1
     :: else
     fi;
     k++
  :: else -> break
  od
}

/* Warp v reads some fields of a task's tile and must find what program order says. */
inline look(v, id, fields) {
  f = 0;
  do
  :: f < FIELDS ->
     if
     :: (fields) & BIT(f) ->
        version_for(TILE_OF(id), KIND_OF(id), f);
        p = 0;
        do
        :: p < GANG -> load(v, CELL(TILE_OF(id), f, p), right); p++
        :: else -> break
        od
     :: else
     fi;
     f++
  :: else -> break
  od;
  f = 0
}

/* A task is about to run, or to be skipped: nobody has done so before, and all that it conflicts with is over. */
inline begin(id) {
  assert(!((started | skipped) & BIT(id)));   /* a task runs twice */
  k = 0;
  do
  :: k < KIND_OF(id) ->
     if
     :: CONFLICT(k, KIND_OF(id)) ->
        assert((finished | skipped) & BIT(TILE_OF(id) * KINDS + k))   /* a task runs before its upstream has finished */
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0
}

/* The cells that part `part` of a gang writes for a task. */
hidden int cells;
inline written_by(id, part) {
  cells = 0;
  f = 0;
  do
  :: f < FIELDS ->
     if
     :: WRITES(KIND_OF(id)) & BIT(f) -> cells = cells | BIT(CELL(TILE_OF(id), f, part))
     :: else
     fi;
     f++
  :: else -> break
  od
}
