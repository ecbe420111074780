-- The last version of each object that was deleted within the last day: the
-- next object under its key begins above it, even if the clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      text   NOT NULL,
    id               text   NOT NULL,
    resource_version bigint NOT NULL,
    deleted_at_ms    bigint NOT NULL,
    PRIMARY KEY (object_type, id)
);
CREATE INDEX IF NOT EXISTS {tombstones_by_age} ON {tombstones} (deleted_at_ms);
