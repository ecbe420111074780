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
