package natstenure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Config configures a [Store]. The zero value is ready to use.
type Config struct {
	// Stream is the name of the stream, which belongs to the store alone, and the first token
	// of all its subjects. Default "TENURE".
	Stream string

	// Bucket is the name of a key-value bucket that keeps the objects instead of a stream with the
	// store's own layout, so that programs that know buckets can show them: a lease is the entry
	// o.TYPE.ID. Servers of version 2.11.2 suffice. In exchange, writes can't be fenced. Migrate
	// creates the bucket if it is missing; other keys in it do no harm. Bucket and Stream must not
	// both be set.
	Bucket string

	// Replicas is how many servers of a cluster keep the stream, if Migrate creates it.
	// Default 1.
	Replicas int

	// SyncAlways says that the servers run with sync_interval: always. A client cannot see that. By
	// default a server syncs every two minutes: if its machine loses power, it loses what it has
	// acknowledged since, and then a lease may be held twice and a fencing token given out twice.
	// Unless SyncAlways is set, Migrate logs a warning.
	SyncAlways bool

	Logger *slog.Logger // default slog.Default()
}

// Store keeps objects in a stream of NATS JetStream. It implements [tenure.Store],
// [tenure.Lister], [tenure.Fencer] and [tenure.Watcher]. All methods are safe for concurrent use.
type Store struct {
	*shared
	term     *tenure.Term // whose fence the writes have to pass; nil: none
	outdated bool         // reads may be outdated, and nothing is written
}

// shared is shared by a store and the fenced stores made from it.
type shared struct {
	js      jetstream.JetStream
	nc      *nats.Conn
	leader  nats.JetStreamContext // reads ask the leader, even where direct gets are allowed
	reports *reports              // of a connection that Open has made; nil: the connection is the caller's
	cfg     Config
	layout

	mu      sync.Mutex
	stream  jetstream.Stream     // once its config has been checked
	known   map[tenure.Key]state // as this process last saw them
	watches *storekit.Feeds
	closed  context.Context // done when the store is closed
	close   context.CancelCauseFunc
	ends    sync.WaitGroup // of goroutines that remove consumers
}

// New returns a store on the connection of js, with its credentials and TLS. The connection remains
// the caller's. New does no I/O; call [Store.Migrate] before the first use.
func New(js jetstream.JetStream, cfg Config) (*Store, error) {
	if js == nil {
		return nil, fmt.Errorf("natstenure: new store: %w: js is nil", tenure.ErrInvalid)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("natstenure: new store: %w", err)
	}
	store, err := newStore(js, cfg)
	if err != nil {
		return nil, fmt.Errorf("natstenure: new store: %w", err)
	}
	return store, nil
}

// withDefaults returns the config with its defaults, or an error that names each invalid field.
func (cfg Config) withDefaults() (Config, error) {
	var errs []error
	if cfg.Bucket != "" {
		if cfg.Stream != "" {
			errs = append(errs, fmt.Errorf("%w: Stream and Bucket are both set; a bucket's stream has its name from the bucket", tenure.ErrInvalid))
		}
		if !isBucket.MatchString(cfg.Bucket) {
			errs = append(errs, fmt.Errorf("%w: Bucket %q has other characters than letters, digits, - and _", tenure.ErrInvalid, cfg.Bucket))
		}
		cfg.Stream = "KV_" + cfg.Bucket
	}
	cfg.Stream = cmp.Or(cfg.Stream, "TENURE")
	cfg.Replicas = cmp.Or(cfg.Replicas, 1)
	cfg.Logger = storekit.Logger(cfg.Logger)
	if strings.ContainsFunc(cfg.Stream, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`.*>/\$`, r) }) {
		errs = append(errs, fmt.Errorf("%w: Stream %q is not one token of a subject", tenure.ErrInvalid, cfg.Stream))
	}
	if cfg.Replicas < 1 || cfg.Replicas > 5 {
		errs = append(errs, fmt.Errorf("%w: Replicas %d is not between 1 and 5", tenure.ErrInvalid, cfg.Replicas))
	}
	return cfg, errors.Join(errs...)
}

var isBucket = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)

func newStore(js jetstream.JetStream, cfg Config) (*Store, error) {
	nc, options := js.Conn(), js.Options()
	leader, err := nc.JetStream(nats.Domain(options.Domain), nats.APIPrefix(options.APIPrefix))
	if err != nil {
		return nil, err
	}
	s := &shared{js: js, nc: nc, leader: leader, cfg: cfg, layout: cfg.layout(), known: make(map[tenure.Key]state)}
	s.closed, s.close = context.WithCancelCause(context.Background())
	store := &Store{shared: s}
	s.watches = storekit.NewFeeds(store.consume, cfg.Logger)
	return store, nil
}

// Outdated returns the store for programs that only read, such as a status page. In a bucket that
// allows direct gets, its Get and List read objects from any server that has a copy, which may lag
// behind. It refuses to write, so no lease can be held on the strength of such a read. All other
// reads ask the stream's leader.
func (s *Store) Outdated() *Store { return &Store{shared: s.shared, outdated: true} }

var errClosed = fmt.Errorf("%w: Close was called", tenure.ErrClosed)

// Close ends the subscriptions, and closes the connection if [Open] made it. A connection that
// was given to [New] remains open.
func (s *Store) Close() error {
	s.close(errClosed)
	s.watches.Close()
	s.ends.Wait()
	if s.reports != nil { // Open has made the connection
		s.nc.Close()
	}
	storekit.Flush(s.cfg.Logger)
	return nil
}

// Traits says that the store is Clockless: the server stamps messages, but does not say how long ago
// that was. CreatedAt and UpdatedAt come from the writers' clocks.
func (s *Store) Traits() tenure.Traits { return tenure.Traits{Clockless: true} }

// Lineage returns the zero Lineage: a stream does not lose what it has acknowledged.
func (s *Store) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

// limited gives a context without a deadline the time limit of the JetStream client.
func (s *Store) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return storekit.WithLimit(ctx, s.js.Options().DefaultTimeout)
}

// explainClosed says of an error that the connection was closed or has given up, and why, if that is so.
func (s *Store) explainClosed(err error) error {
	if err == nil || storekit.Refusal(err) || !s.nc.IsClosed() {
		return err
	}
	why := "the connection to NATS was closed"
	if last := s.nc.LastError(); last != nil {
		why = fmt.Sprintf("the client has given up the connection to NATS (%v): connect with nats.MaxReconnects(-1) and nats.IgnoreAuthErrorAbort()", last)
	}
	return fmt.Errorf("%w: %s: %w", tenure.ErrClosed, why, err)
}

// opError is deferred to explain the error that a method returns.
func (s *Store) opError(ctx context.Context, err *error, op string, what any) {
	*err = s.reports.explain(s.explainClosed(*err))
	storekit.OpError(ctx, err, "natstenure: "+op, what)
}

// Get returns the object, or [tenure.ErrNotFound].
func (s *Store) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
	defer s.opError(ctx, &err, "get", key)
	return s.get(ctx, key)
}

func (s *Store) get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	ctx, cancel := s.limited(ctx)
	defer cancel()
	st, obj, err := s.read(ctx, key)
	switch {
	case err != nil:
		return tenure.Object{}, err
	case st.version() == 0:
		return tenure.Object{}, tenure.ErrNotFound
	}
	return obj, nil
}

// read returns what the stream has for a key.
func (s *Store) read(ctx context.Context, key tenure.Key) (state, tenure.Object, error) {
	msg, err := s.last(ctx, s.subject(key)+s.either)
	var st state
	var obj tenure.Object
	if msg != nil {
		st, obj = decode(key, msg.Sequence, msg.Data, msg.Time)
		st.id = cmp.Or(msg.Header.Get(jetstream.MsgIDHeader), msg.Header.Get(headerBatch))
	}
	if err == nil {
		s.saw(key, st, !s.outdated)
	}
	return st, obj, err
}

// EverExisted reports whether there has ever been an object under the key, which may have been
// deleted since.
func (s *Store) EverExisted(ctx context.Context, key tenure.Key) (known bool, err error) {
	defer s.opError(ctx, &err, "get", key)
	ctx, cancel := s.limited(ctx)
	defer cancel()
	msg, err := s.last(ctx, s.subject(key)+s.either)
	return msg != nil, err
}

// last returns the last message of a subject; nil if there is none.
func (s *Store) last(ctx context.Context, subject string) (*jetstream.RawStreamMsg, error) {
	stream, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	if s.outdated {
		msg, err := stream.GetLastMsgForSubject(ctx, subject) // a direct get, if the stream allows it
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil, nil
		}
		return msg, err
	}
	msg, err := s.leader.GetLastMsg(s.cfg.Stream, subject, nats.Context(ctx))
	switch {
	case errors.Is(err, nats.ErrMsgNotFound):
		return nil, nil
	case errors.Is(err, nats.ErrStreamNotFound):
		return nil, storekit.NotMigrated(fmt.Errorf("there is no stream %s (%w)", s.cfg.Stream, err))
	}
	return (*jetstream.RawStreamMsg)(msg), err
}

// mostKnown limits how many objects a store remembers.
const mostKnown = 4096

// saw remembers the state of an object. A state that was just read replaces what was known; the
// state from an event, or from a write, may be older than that.
func (s *shared) saw(key tenure.Key, st state, read bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !read && s.known[key].sequence > st.sequence {
		return
	}
	if _, ok := s.known[key]; !ok && len(s.known) >= mostKnown {
		for other := range s.known {
			delete(s.known, other)
			break
		}
	}
	s.known[key] = st
}

// recall returns what is known about an object.
func (s *shared) recall(key tenure.Key) (st state, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, ok = s.known[key]
	return st, ok
}

func (s *shared) forget(key tenure.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, key)
}

// readAtOnce is how many messages a list reads at the same time.
const readAtOnce = 16

// List returns at most limit objects of a type whose IDs come after the given one, in the order of
// the IDs' bytes. It asks the server for the subjects of the whole type each time, and for each
// object that it returns.
func (s *Store) List(ctx context.Context, objectType, after string, limit int) (found []tenure.Object, err error) {
	defer s.opError(ctx, &err, "list", objectType)
	if err := cmp.Or(storekit.CheckList(objectType, after, limit), ctx.Err()); err != nil {
		return nil, err
	}
	ctx, cancel := s.limited(ctx)
	defer cancel()
	stream, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	prefix := s.prefix + ofObjects + token(objectType) + "."
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(prefix+">"))
	if err != nil {
		return nil, err
	}
	ids := make(map[string]bool)
	for subject := range info.State.Subjects {
		tok, _, _ := strings.Cut(strings.TrimPrefix(subject, prefix), ".")
		id, ok := untoken(tok)
		if !ok {
			if id, err = s.longID(ctx, prefix+tok+s.either); err != nil {
				return nil, err
			}
		}
		if id > after && (tenure.Key{Type: objectType, ID: id}).Validate() == nil { // other programs may publish anything
			ids[id] = true
		}
	}
	sorted := slices.Sorted(maps.Keys(ids))
	for len(sorted) > 0 && len(found) < limit { // some of them were deleted
		n := min(len(sorted), limit-len(found))
		some, err := s.getAll(ctx, objectType, sorted[:n])
		if err != nil {
			return nil, err
		}
		found, sorted = append(found, some...), sorted[n:]
	}
	return found, nil
}

// longID returns the ID of an object whose subject has only a hash of it; it is empty if the object
// is gone by now.
func (s *Store) longID(ctx context.Context, subject string) (string, error) {
	msg, err := s.last(ctx, subject)
	if msg == nil {
		return "", err
	}
	st, _ := decode(tenure.Key{}, msg.Sequence, msg.Data, msg.Time)
	return st.ID, nil
}

// getAll returns the objects that exist.
func (s *Store) getAll(ctx context.Context, objectType string, ids []string) (found []tenure.Object, err error) {
	objects, errs := make([]tenure.Object, len(ids)), make([]error, len(ids))
	slots := make(chan struct{}, readAtOnce)
	var reads sync.WaitGroup
	for i, id := range ids {
		slots <- struct{}{}
		reads.Go(func() {
			defer func() { <-slots }()
			objects[i], errs[i] = s.get(ctx, tenure.Key{Type: objectType, ID: id})
		})
	}
	reads.Wait()
	for i := range ids {
		switch {
		case errs[i] == nil:
			found = append(found, objects[i])
		case !errors.Is(errs[i], tenure.ErrNotFound):
			err = errors.Join(err, errs[i])
		}
	}
	return found, err
}
