CREATE TABLE IF NOT EXISTS {objects} (
    object_type      TEXT    NOT NULL,
    id               TEXT    NOT NULL,
    name             TEXT,
    labels           TEXT,
    payload          BLOB    NOT NULL,
    resource_version INTEGER NOT NULL,
    created_at_ms    INTEGER NOT NULL,
    updated_at_ms    INTEGER NOT NULL,
    PRIMARY KEY (object_type, id),
    UNIQUE (object_type, name)
);
-- The last version of each deleted object, kept until the clock is a day past it,
-- so that the next object under the same key gets a greater version even if the
-- clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      TEXT    NOT NULL,
    id               TEXT    NOT NULL,
    resource_version INTEGER NOT NULL,
    PRIMARY KEY (object_type, id)
);
CREATE INDEX IF NOT EXISTS {tombstones_by_age} ON {tombstones_table} (resource_version);
-- Who owns what: a session, whose record is one of the objects, or nobody if that column is
-- NULL. A row outlives its owner, so its tokens increase.
CREATE TABLE IF NOT EXISTS {claims} (
    kind    TEXT    NOT NULL,
    id      TEXT    NOT NULL,
    session TEXT,
    token   INTEGER NOT NULL,
    PRIMARY KEY (kind, id)
);
CREATE INDEX IF NOT EXISTS {claims_by_session} ON {claims_table} (session, kind, id);
-- For those that are deleted because nobody has claimed them for long.
CREATE INDEX IF NOT EXISTS {claims_by_age} ON {claims_table} (token) WHERE session IS NULL;
-- Which claims somebody asks for.
CREATE TABLE IF NOT EXISTS {requests} (
    session TEXT    NOT NULL,
    kind    TEXT    NOT NULL,
    id      TEXT    NOT NULL,
    token   INTEGER NOT NULL,
    PRIMARY KEY (session, kind, id, token)
);
