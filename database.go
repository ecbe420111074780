package tenure

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/storeurl"
)

// Database is a store that [Open] has opened.
type Database interface {
	Lister
	Watcher
	Notifier
	Fencer
	SQLStore

	// Migrate creates the tables that are missing. It may be called at every start, by many
	// processes at once.
	Migrate(ctx context.Context) error

	// DB returns the database, for a program's own statements on either.
	DB() *sql.DB

	// Close ends the subscriptions and closes the connections.
	Close() error
}

// Open opens the store that a URL names, so that a program can run on SQLite in one place and on
// Postgres in another. It opens a postgres:// or postgresql:// URL as [OpenPostgres] does, and the
// path of a file, with or without sqlite: before it, as [OpenSQLite] does: this process is alone with the
// file, and a [Coordinator] needs no lease. With ?shared=true after the path, as in
// sqlite:data.db?shared=true, the file is Shared: several processes use it, and compete for leases.
// Anything else is [ErrInvalid], and the error does not quote it, because it may contain a
// password. That includes :memory:, which cannot be shared, and a relative path with // or one of
// the characters : @ ? = in it, which may be a mistyped URL: put ./ before such a path. To set
// more than the defaults, use OpenPostgres or OpenSQLite.
func Open(ctx context.Context, url string) (Database, error) {
	path, shared, err := storeurl.Path(url)
	if err != nil {
		return nil, fmt.Errorf("tenure: open: %w: %w", ErrInvalid, err)
	}
	if path == "" {
		return asDatabase(OpenPostgres(ctx, url, PostgresConfig{}))
	}
	return asDatabase(OpenSQLite(ctx, path, SQLiteConfig{Shared: shared}))
}

// asDatabase keeps a nil pointer from becoming a Database that is not nil.
func asDatabase[S Database](store S, err error) (Database, error) {
	if err != nil {
		return nil, err
	}
	return store, nil
}

// Static returns a store that keeps nothing, for a deployment of one replica without a
// database: a [Coordinator] over it holds at once, unless another one over it holds the same key.
// Reads find nothing, and writes return [errors.ErrUnsupported].
func Static() Store { return new(static) }

type static struct{ turns Turns }

func (s *static) Traits() Traits { return Traits{Alone: &s.turns} }

func (*static) Lineage(context.Context) (Lineage, error) { return Lineage{}, nil }

func (*static) Get(ctx context.Context, key Key) (Object, error) {
	return Object{}, opError(ctx, "get", key, ErrNotFound)
}

func (*static) PutIf(_ context.Context, obj Object, _ WriteCondition) (Object, error) {
	return Object{}, fmt.Errorf("tenure: put %s: %w: a static store keeps nothing", obj.Key, errors.ErrUnsupported)
}

func (*static) DeleteIf(_ context.Context, key Key, _ WriteCondition) error {
	return fmt.Errorf("tenure: delete %s: %w: a static store keeps nothing", key, errors.ErrUnsupported)
}

func (o Object) row() objects.Row {
	return objects.Row{
		ID:      objects.ID(o.Key),
		Name:    objects.EncodeName(o.Name),
		Labels:  []byte(objects.EncodeLabels(o.Labels)),
		Payload: objects.EncodePayload(o.Payload),
	}
}

func objectOf(r objects.Row) Object {
	return Object{
		Key:       Key(r.ID),
		Name:      r.Name.String,
		Labels:    objects.DecodeLabels(r.Labels),
		Payload:   r.Payload,
		Version:   r.Version,
		CreatedAt: objects.Stamp(r.Created),
		UpdatedAt: objects.Stamp(r.Updated),
		Age:       r.Age,
	}
}

func objectsOf(rows []objects.Row) (all []Object) {
	for _, r := range rows {
		all = append(all, objectOf(r))
	}
	return all
}

// written returns the object as a write has stored it.
func (o Object) written(r objects.Row) Object {
	o.Version, o.Age = r.Version, 0
	o.CreatedAt, o.UpdatedAt = objects.Stamp(r.Created), objects.Stamp(r.Updated)
	return o
}

// tables is what the stores on Postgres and SQLite have in common. Each method checks its
// arguments, converts them, calls the table, and says in the error which operation failed.
type tables struct {
	all   objects.Table
	fence *objects.Fence // that all writes pass; nil: they are not fenced
}

// Backend returns the tables that package claims works on. It is for packages of this module.
func (s *tables) Backend() objects.Backend { return s.all }

// Get implements [Store].
func (s *tables) Get(ctx context.Context, key Key) (Object, error) {
	if err := key.Validate(); err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	r, err := s.all.Get(ctx, objects.ID(key))
	if err != nil {
		return Object{}, opError(ctx, "get", key, err)
	}
	return objectOf(r), nil
}

// List implements [Lister].
func (s *tables) List(ctx context.Context, objectType, after string, limit int) ([]Object, error) {
	if err := objects.ValidList(objectType, after, limit); err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	rows, err := s.all.List(ctx, objectType, after, limit)
	if err != nil {
		return nil, opError(ctx, "list", Key{Type: objectType}, err)
	}
	return objectsOf(rows), nil
}

// PutIf implements [Store].
func (s *tables) PutIf(ctx context.Context, obj Object, cond WriteCondition) (Object, error) {
	if err := errors.Join(obj.Validate(), cond.Validate(), s.notItself(obj.Key)); err != nil {
		return Object{}, opError(ctx, "put", obj.Key, err)
	}
	r, err := s.all.Put(ctx, obj.row(), cond.c, s.fence)
	if err != nil {
		return Object{}, opError(ctx, "put", obj.Key, err)
	}
	return obj.written(r), nil
}

// DeleteIf implements [Store].
func (s *tables) DeleteIf(ctx context.Context, key Key, cond WriteCondition) error {
	return s.delete(ctx, key, cond, false)
}

// DeleteAndWake implements [Notifier].
func (s *tables) DeleteAndWake(ctx context.Context, key Key, cond WriteCondition) error {
	return s.delete(ctx, key, cond, true)
}

func (s *tables) delete(ctx context.Context, key Key, cond WriteCondition, wake bool) error {
	if err := errors.Join(key.Validate(), cond.ValidateDelete(), s.notItself(key)); err != nil {
		return opError(ctx, "delete", key, err)
	}
	if err := s.all.Delete(ctx, objects.ID(key), cond.c, s.fence, wake); err != nil {
		return opError(ctx, "delete", key, err)
	}
	return nil
}

// Wake implements [Notifier].
func (s *tables) Wake(ctx context.Context, key Key) error {
	err := key.Validate()
	if err == nil {
		err = s.all.Wake(ctx, objects.ID(key))
	}
	if err != nil {
		return opError(ctx, "wake", key, err)
	}
	return nil
}

// FenceStatement implements [SQLStore].
func (s *tables) FenceStatement(guard Guard) (query string, args []any, err error) {
	fence, err := fenceOf("fence statement", guard)
	if err != nil {
		return "", nil, err
	}
	query, args, err = s.all.FenceStatement(fence)
	if err != nil {
		return "", nil, opError(context.Background(), "failed to make the fence statement of", Key(fence.ID), err)
	}
	return query, args, nil
}

// PutStatement implements [SQLStore].
func (s *tables) PutStatement(obj Object, version int64) (query string, args []any, err error) {
	err = errors.Join(obj.Validate(), objects.ValidVersion(version))
	if s.fence != nil { // the statement would not be fenced
		err = fmt.Errorf("%w: the store is fenced; add FenceStatement to the transaction", errors.ErrUnsupported)
	}
	if err == nil {
		query, args, err = s.all.PutStatement(obj.row(), version)
	}
	if err != nil {
		return "", nil, fmt.Errorf("tenure: put statement: %w", err)
	}
	return query, args, nil
}

// fencedBy returns the same tables with the fence of a guard.
func (s *tables) fencedBy(guard Guard) (tables, error) {
	if s.fence != nil {
		return tables{}, fmt.Errorf("tenure: fence: %w: the store is fenced already", errors.ErrUnsupported)
	}
	fence, err := fenceOf("fence", guard)
	return tables{s.all, fence}, err
}

// notItself refuses a fenced write to the record that its fence depends on.
func (s *tables) notItself(key Key) error {
	if s.fence != nil && s.fence.Claim == nil && objects.ID(key) == s.fence.ID {
		return fmt.Errorf("%w: the lease's own object can't be written through its fence", ErrInvalid)
	}
	return nil
}

// opError says which operation failed, on which key, and whether its context has ended: some
// drivers only say that they were interrupted.
func opError(ctx context.Context, op string, key Key, err error) error {
	if ended := ctx.Err(); ended != nil && !objects.Refusal(err) && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	return fmt.Errorf("tenure: %s %s: %w", op, key, err)
}
