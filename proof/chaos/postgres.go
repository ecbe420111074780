package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// postgres is a separate server. Replicas connect as the role app, whose search_path finds
// a clock that can be set before the server's own.
type postgres struct {
	server *testkit.PostgresServer
	admin  *url.URL
	app    *url.URL
	theme  theme
}

// theme decides between two kinds of faults that must not happen on one server. Without
// tombstones only the database's clock keeps versions from going back, and a clock that was
// ahead leaves versions that are ahead of it. A server that loses tombstones never has its clock
// moved, and there tokens must rise without exception.
type theme uint8

const (
	movesClock theme = iota
	spoilsTombstones
)

// The ledger is in the order of the commits: their timestamps are taken while the locks are
// still held, and from the host's clock.
const postgresSchema = `
CREATE TABLE ledger (kind text, lease text, term text, token bigint, note text);
CREATE INDEX ON ledger (term);

CREATE FUNCTION note_term() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF TG_OP <> 'INSERT' AND OLD.id LIKE 'crowd-%' THEN
		PERFORM pg_sleep(0.003); -- so long that others join the next group
	END IF;
	IF TG_OP = 'DELETE' THEN
		INSERT INTO public.ledger VALUES ('end', OLD.id, convert_from(OLD.payload, 'UTF8')::json->>'term', OLD.resource_version, '');
	ELSIF TG_OP = 'INSERT' OR NEW.payload <> OLD.payload THEN
		INSERT INTO public.ledger VALUES ('begin', NEW.id, convert_from(NEW.payload, 'UTF8')::json->>'term', NEW.resource_version,
			floor(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint);
	ELSIF OLD.created_at_ms = 0 THEN -- inserted by the same transaction, and numbered now
		UPDATE public.ledger SET token = NEW.resource_version WHERE kind = 'begin' AND term = convert_from(NEW.payload, 'UTF8')::json->>'term';
	ELSE
		INSERT INTO public.ledger VALUES ('renewed', NEW.id, convert_from(NEW.payload, 'UTF8')::json->>'term', NEW.resource_version,
			floor(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint);
	END IF;
	IF TG_OP = 'DELETE' OR NEW.created_at_ms <> 0 THEN -- else it has no number yet
		INSERT INTO public.ledger VALUES ('version', coalesce(NEW.id, OLD.id), convert_from(coalesce(NEW.payload, OLD.payload), 'UTF8')::json->>'term',
			coalesce(NEW.resource_version, OLD.resource_version), json_build_object(
			'by', current_setting('application_name'), 'at', floor(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint,
			'over', CASE WHEN OLD.created_at_ms <> 0 THEN OLD.resource_version END, 'stamp', NEW.updated_at_ms,
			'payload', convert_from(NEW.payload, 'UTF8'), 'request', NEW.labels->>'tenure.release'));
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER term AFTER INSERT OR UPDATE ON objects FOR EACH ROW
	WHEN (NEW.object_type = 'reconciler_lease') EXECUTE FUNCTION note_term();
CREATE TRIGGER term_end AFTER DELETE ON objects FOR EACH ROW
	WHEN (OLD.object_type = 'reconciler_lease') EXECUTE FUNCTION note_term();

CREATE FUNCTION note_fenced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE said json := convert_from(NEW.payload, 'UTF8')::json;
BEGIN
	IF TG_OP = 'INSERT' OR NEW.payload <> OLD.payload THEN
		INSERT INTO public.ledger (kind, term, token, note) VALUES ('fenced', said->>'term', (said->>'token')::bigint, said->>'note');
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER fenced AFTER INSERT OR UPDATE ON objects FOR EACH ROW
	WHEN (NEW.object_type = 'fenced') EXECUTE FUNCTION note_fenced();

-- Between the check of a fence and its commit there is hardly any time, and it is
-- then that a takeover must wait.
CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(random() * 0.1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER linger AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
	WHEN (NEW.kind IN ('fenced', 'claim fenced', 'row effect') AND NEW.note LIKE '%late%') EXECUTE FUNCTION linger();

CREATE SCHEMA chaos;
CREATE TABLE chaos.clock (ahead interval);
INSERT INTO chaos.clock VALUES ('0');
CREATE FUNCTION chaos.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
	'SELECT pg_catalog.clock_timestamp() + (SELECT ahead FROM chaos.clock)';

CREATE ROLE app LOGIN;
ALTER ROLE app SET search_path = chaos, pg_catalog, public;
GRANT USAGE ON SCHEMA chaos TO app;
GRANT SELECT ON chaos.clock TO app;
GRANT SELECT, INSERT, UPDATE, DELETE ON objects, objects_tombstones, objects_claims, objects_requests, ledger TO app;

CREATE FUNCTION note_claims() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.ledger (kind, lease, term, token, note)
	SELECT 'wrong', n.id, n.session, n.token, format('the claim of %s with token %s was taken over while its session had a record', o.session, o.token)
	FROM before o JOIN after n USING (kind, id) WHERE n.session <> o.session AND n.kind NOT LIKE 'tenure.attach/%'
	AND EXISTS (SELECT FROM public.objects WHERE object_type = 'tenure.session' AND objects.id = o.session)
	AND NOT EXISTS (SELECT FROM public.objects_claims w -- its owner has offered it to who attaches
		WHERE w.kind = 'tenure.attach/' || n.kind AND w.id = o.session || '/' || o.token || '/' || n.id AND w.session = o.session);
	INSERT INTO public.ledger (kind, lease, term, token, note)
	SELECT 'wrong', n.id, n.session, n.token, format('it comes after token %s', o.token)
	FROM before o JOIN after n USING (kind, id) WHERE n.session IS DISTINCT FROM o.session AND n.session IS NOT NULL AND n.token <= o.token;
	INSERT INTO public.ledger (kind, lease, term, token, note)
	SELECT CASE WHEN n.session IS NULL THEN 'claim end' ELSE 'claim begin' END, n.id, coalesce(n.session, o.session) || '.' || n.token || '.' || n.id, n.token, ''
	FROM before o JOIN after n USING (kind, id) WHERE n.session IS DISTINCT FROM o.session AND (n.id LIKE 'actor-%' OR n.kind LIKE 'slots/%');
	RETURN NULL;
END $$;
CREATE FUNCTION note_new_claims() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.ledger (kind, lease, term, token, note)
	SELECT 'claim begin', id, session || '.' || token || '.' || id, token, '' FROM after WHERE id LIKE 'actor-%' OR kind LIKE 'slots/%';
	RETURN NULL;
END $$;
CREATE TRIGGER claims AFTER UPDATE ON objects_claims REFERENCING OLD TABLE AS before NEW TABLE AS after
	FOR EACH STATEMENT EXECUTE FUNCTION note_claims();
CREATE TRIGGER new_claims AFTER INSERT ON objects_claims REFERENCING NEW TABLE AS after
	FOR EACH STATEMENT EXECUTE FUNCTION note_new_claims();
`

const postgresWork = `
CREATE TABLE work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL);
%s
CREATE FUNCTION note_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.session IS DISTINCT FROM OLD.session THEN
		INSERT INTO public.ledger (kind, lease, term, token, note)
		VALUES (CASE WHEN NEW.session IS NOT NULL THEN 'row begin' WHEN NEW.status = 'done' THEN 'row done' ELSE 'row free' END,
			NEW.id, coalesce(NEW.session, OLD.session) || '.' || NEW.token || '.' || NEW.id, NEW.token, NEW.attempts);
	ELSE
		INSERT INTO public.ledger (kind, lease, term, token, note) VALUES ('wrong', NEW.id, NEW.session, NEW.token, 'the row changed, and not its owner');
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER rows AFTER UPDATE ON work FOR EACH ROW EXECUTE FUNCTION note_rows();
GRANT SELECT, INSERT, UPDATE ON work TO app;
`

const renewAsCopy = `
UPDATE objects SET resource_version = greatest(resource_version + 1, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint),
	updated_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
WHERE object_type = 'reconciler_lease' AND id = 'singleton'
RETURNING convert_from(payload, 'UTF8')::json->>'term', resource_version`

func newPostgres(ctx context.Context, theme theme, settings ...string) (*postgres, error) {
	server, err := testkit.NewPostgres(append(settings, "track_commit_timestamp=on", "max_connections=80", "log_checkpoints=off",
		// A client that hangs while it connects would otherwise keep the server from stopping.
		"authentication_timeout=2s")...)
	if err != nil {
		return nil, err
	}
	db := &postgres{theme: theme}
	db.moveTo(server)
	if err := db.prepare(ctx); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return db, nil
}

func (db *postgres) prepare(ctx context.Context) (err error) {
	store, err := db.open(ctx, db.admin)
	if err != nil {
		return err
	}
	defer store.Close()
	if err := migrate(ctx, store); err != nil {
		return err
	}
	ddl, err := workedOn.PostgresDDL()
	if err != nil {
		return err
	}
	if err := db.exec(ctx, postgresSchema+fmt.Sprintf(postgresWork, ddl)); err != nil {
		return err
	}
	return db.tryClock(ctx)
}

// moveTo makes a server the one that is the database.
func (db *postgres) moveTo(server *testkit.PostgresServer) {
	db.server = server
	db.admin = testkit.Must(url.Parse(server.URL()))
	app := *db.admin
	app.User = url.User("app")
	db.app = &app
}

func (db *postgres) open(ctx context.Context, u *url.URL) (*tenure.PostgresStore, error) {
	return tenure.OpenPostgres(ctx, u.String(), tenure.PostgresConfig{Logger: slog.New(slog.DiscardHandler)})
}

func (db *postgres) connect(ctx context.Context) (*pgx.Conn, error) {
	return pgx.Connect(ctx, db.admin.String())
}

// exec runs statements as the superuser.
func (db *postgres) exec(ctx context.Context, sql string) error {
	conn, err := db.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

func (db *postgres) setClock(ctx context.Context, ahead time.Duration) error {
	return db.exec(ctx, fmt.Sprintf("UPDATE chaos.clock SET ahead = '%d ms'", ahead.Milliseconds()))
}

// tryClock makes sure that the library's statements read the clock that can be set,
// including statements that were prepared before it was set.
func (db *postgres) tryClock(ctx context.Context) error {
	store, err := db.open(ctx, db.app)
	if err != nil {
		return err
	}
	defer store.Close()
	obj := tenure.Object{Key: tenure.Key{Type: "clock", ID: "1"}}
	var times []time.Time
	for _, ahead := range []time.Duration{0, 5 * time.Hour, -5 * time.Hour, 0} {
		if err := db.setClock(ctx, ahead); err != nil {
			return err
		}
		obj, err = store.PutIf(ctx, obj, tenure.Unconditional())
		if err != nil {
			return err
		}
		times = append(times, obj.UpdatedAt.Add(-ahead))
		if read, err := store.Get(ctx, obj.Key); err != nil || read.Age > time.Minute || read.Age < 0 {
			return fmt.Errorf("trying the clock: age %v, error %w", read.Age, err)
		}
	}
	for _, t := range times {
		if off := t.Sub(times[0]); off < 0 || off > time.Minute {
			return fmt.Errorf("the library does not see that the clock is set: %v", times)
		}
	}
	return store.DeleteIf(ctx, obj.Key, tenure.IfVersion(obj.Version))
}

func (db *postgres) replica(i int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	proxy, err := rig.NewProxy(db.admin.Host, nil)
	if err != nil {
		return cfg, nil, err
	}
	u := *db.app
	u.Host = proxy.Addr()
	q := u.Query()
	q.Set("application_name", cfg.Name)
	q.Set("connect_timeout", "2")
	if i%2 == 1 { // so short that some connection often exceeds it while the server is full
		q.Set("pool_max_conn_lifetime", (time.Duration(2*i) * ttl).String())
	}
	u.RawQuery = q.Encode()
	cfg.URL, cfg.SharePool, cfg.Pace, cfg.Crowd = u.String(), i%2 == 0, 60*time.Millisecond, crowdWorkers
	return cfg, proxy, nil
}

func (db *postgres) texts(ctx context.Context, query string) ([]string, error) {
	conn, err := db.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, query)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func (db *postgres) final(context.Context, *phase) error { return nil }

func (db *postgres) close() error { return db.server.Close() }

func (db *postgres) audit(ctx context.Context) (*audit, error) {
	conn, err := db.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	a := &audit{fit: true, groups: true, versions: true}
	rows, err := conn.Query(ctx, `SELECT kind, coalesce(lease, ''), term, token, note, pg_xact_commit_timestamp(xmin)::text, xmin::text FROM ledger
		ORDER BY pg_xact_commit_timestamp(xmin), ctid`)
	if err != nil {
		return nil, err
	}
	a.ledger, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e entry, err error) {
		err = row.Scan(&e.kind, &e.lease, &e.term, &e.token, &e.note, &e.at, &e.tx)
		return e, err
	})
	if err != nil {
		return nil, err
	}
	store, err := db.open(ctx, db.admin)
	if err != nil {
		return nil, err
	}
	err = errors.Join(a.readObjects(ctx, store), store.Close())
	if err != nil {
		return nil, err
	}
	// A backend ends a moment after its client.
	for range 50 {
		rows, err = conn.Query(ctx, `SELECT application_name || ': ' || state || ' ' || query FROM pg_stat_activity WHERE usename = 'app'`)
		if err != nil {
			return nil, err
		}
		if a.connections, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || len(a.connections) == 0 {
			break
		}
		pause(ctx, 100*time.Millisecond)
	}
	return a, err
}

// readObjects reads all objects.
func (a *audit) readObjects(ctx context.Context, store tenure.Store) error {
	a.once, a.registers = map[string]string{}, map[string]op{}
	for obj, err := range tenure.List(ctx, store, onceType) {
		if err != nil {
			return err
		}
		a.once[obj.Key.ID] = string(obj.Payload)
	}
	for obj, err := range tenure.List(ctx, store, registerType) {
		if err != nil {
			return err
		}
		a.registers[obj.Key.ID] = op{Do: get, Key: obj.Key.ID, Outcome: done, Now: obj.Version, Read: string(obj.Payload)}
	}
	return nil
}
