package kubetenure

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Config configures a [Store]. In a pod, the zero value is ready to use.
type Config struct {
	// Namespace is the namespace of the Leases. Default: the pod's own.
	Namespace string

	// Leases overrides the names of the Leases of some keys, for example with the name that
	// candidates of client-go use. The default name is ID.TYPE, as in sweeper.lease, if both are
	// DNS labels; otherwise it is tenure- and a hash.
	Leases map[tenure.Key]string

	// URL is the URL of the API server, such as https://host:6443. Default: the API server of the
	// pod's cluster.
	URL string

	// Client sends the requests. It adds credentials, must not limit the rate of requests, and must
	// have no Timeout, which would end watches: for example, client-go's rest.HTTPClientFor.
	// Default: a client with the pod's service account or, if URL is set, one without credentials,
	// for a proxy that adds them.
	Client *http.Client

	Logger *slog.Logger // default slog.Default()
}

// Store stores objects as Leases. It implements [tenure.Store], [tenure.Lister] and [tenure.Watcher].
// All methods are safe for concurrent use.
type Store struct {
	client  *client
	cfg     Config
	watches *storekit.Feeds

	mu     sync.Mutex
	known  map[tenure.Key]*known
	era    context.Context // done when the API server is found to be older than what it told before
	endEra context.CancelFunc
	closed bool
}

// known is the latest state of a Lease that this process has seen.
type known struct {
	*state
	doubted bool // a write has found another state, or its outcome is unknown
}

// New returns a store. It reads the pod's files and sends no request; call [Store.Migrate] before the
// first use. Its errors are [tenure.ErrInvalid].
func New(cfg Config) (*Store, error) {
	client, err := newClient(&cfg)
	if err != nil {
		return nil, fmt.Errorf("kubetenure: new store: %w", err)
	}
	of := make(map[string]tenure.Key)
	for key, name := range cfg.Leases {
		if err := key.Validate(); err != nil {
			return nil, fmt.Errorf("kubetenure: new store: Leases: %w", err)
		}
		if len(name) > 253 || slices.ContainsFunc(strings.Split(name, "."), func(part string) bool { return !label.MatchString(part) }) {
			return nil, fmt.Errorf("kubetenure: new store: %w: %q of %s is not a valid name of a Lease", tenure.ErrInvalid, name, key)
		}
		if other, taken := of[name]; taken {
			return nil, fmt.Errorf("kubetenure: new store: %w: Lease %s is that of %s and of %s", tenure.ErrInvalid, name, key, other)
		}
		of[name] = key
	}
	cfg.Leases = maps.Clone(cfg.Leases)
	cfg.Logger = storekit.Logger(cfg.Logger)
	s := &Store{client: client, cfg: cfg, known: make(map[tenure.Key]*known)}
	s.era, s.endEra = context.WithCancel(context.Background())
	s.watches = storekit.NewFeeds(s.follow, cfg.Logger)
	return s, nil
}

// String names the namespace and the API server.
func (s *Store) String() string { return "namespace " + s.cfg.Namespace + " at " + s.client.url }

// Traits says that the store is Clockless, because clients cannot read the API server's clock
// (CreatedAt and UpdatedAt are times of the writers' clocks), and Nameless, because only the name of
// a Lease is unique, and it is derived from the key.
func (s *Store) Traits() tenure.Traits { return tenure.Traits{Clockless: true, Nameless: true} }

// Lineage returns the zero Lineage: the API server does not lose what it has acknowledged.
func (s *Store) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

// Close ends the store's subscriptions, and later calls of other methods fail. It does not close
// Config.Client.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.watches.Close()
	s.endEra()
	s.client.close()
	if s.cfg.Client == nil {
		s.client.http.CloseIdleConnections()
	}
	storekit.Flush(s.cfg.Logger)
	return nil
}

var errClosed = fmt.Errorf("%w: Close was called", tenure.ErrClosed)

const requestTimeout = 5 * time.Second

// begin limits the time of a request, and fails if the store is closed.
func (s *Store) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	if s.closed {
		return ctx, cancel, errClosed
	}
	return ctx, cancel, ctx.Err()
}

// probe is the name of a Lease that is never written.
const probe = "tenure-probe"

// Migrate checks whether the store can work, by a dry run that creates a Lease named tenure-probe. It
// writes nothing and may be called at every start. A [tenure.ErrSetup] says what is missing: the
// namespace, a permission, or valid credentials.
func (s *Store) Migrate(ctx context.Context) (err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: migrate", "namespace "+s.cfg.Namespace)
	ctx, cancel, err := s.begin(ctx)
	defer cancel()
	if err != nil {
		return err
	}
	o := object{Type: "tenure", ID: "probe", Write: crand.Text()}
	l := new(state).encode(probe, s.cfg.Namespace, o, []byte("probe"), leaseSpec{HolderIdentity: "probe", LeaseDurationSeconds: 3600})
	var got lease
	var answer *status
	err = s.client.send(ctx, http.MethodPut, probe, url.Values{"dryRun": {"All"}}, &l, &got)
	switch {
	case errors.Is(err, tenure.ErrInvalid) && errors.As(err, &answer): // a policy refused it: the Lease itself is valid
		return fmt.Errorf("%w: %w", tenure.ErrSetup, answer)
	case err != nil:
		return err
	case !l.isKeptBy(got):
		return fmt.Errorf("%w: %w", tenure.ErrSetup, errChanged)
	}
	return nil
}

// errChanged is the error of a write that the API server changed before it stored it.
var errChanged = errors.New("the API server has changed the holder, the duration or the annotations below " + prefix + " of the Lease: exclude Leases from the admission webhook or policy that does so")

func (s *Store) name(key tenure.Key) string { return cmp.Or(s.cfg.Leases[key], nameOf(key)) }

// Get returns the object, or [tenure.ErrNotFound], by a quorum read. A Lease that another program
// has written is an object with that program's record.
func (s *Store) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: get", key)
	if err := key.Validate(); err != nil {
		return tenure.Object{}, err
	}
	ctx, cancel, err := s.begin(ctx)
	defer cancel()
	if err != nil {
		return tenure.Object{}, err
	}
	is, err := s.read(ctx, key)
	if err != nil {
		return tenure.Object{}, err
	}
	if is.version() == 0 {
		return tenure.Object{}, tenure.ErrNotFound
	}
	return is.tenureObject(key), nil
}

func (s *Store) read(ctx context.Context, key tenure.Key) (*state, error) {
	before := s.recall(key)
	var got lease
	err := s.client.send(ctx, http.MethodGet, s.name(key), nil, nil, &got)
	is := &state{}
	switch {
	case is404(err):
	case err != nil:
		return nil, err
	default:
		if is, err = decode(key, got); err != nil {
			return nil, err
		}
	}
	if before != nil && is.at != 0 && is.at-is.above < before.at-before.above { // without what was added by hand
		s.wentBack(key, before.state, is)
	}
	s.saw(key, before, is)
	return is, nil
}

// is404 reports whether there is no such Lease.
func is404(err error) bool { return is(err, http.StatusNotFound) && !errors.Is(err, tenure.ErrSetup) }

// wentBack ends all watches, which would otherwise wait until the cluster reaches their revisions again.
func (s *Store) wentBack(key tenure.Key, before, is *state) {
	s.cfg.Logger.Warn("the API server is older than what it told before: etcd was restored; without this repair no replica that knows a greater token begins a term",
		"key", key.String(), "version", is.at, "before", before.at,
		"repair", fmt.Sprintf("kubectl annotate --overwrite lease %s -n %s %s=%d", s.name(key), s.cfg.Namespace, ofAbove, before.at))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endEra()
	clear(s.known)
	s.era, s.endEra = context.WithCancel(context.Background())
}

// mostKnown is how many Leases a store remembers.
const mostKnown = 4096

// recall returns what is known of a Lease, or nil.
func (s *Store) recall(key tenure.Key) *known {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[key]
}

// saw remembers a state, unless a newer one was seen after the caller had recalled before.
func (s *Store) saw(key tenure.Key, before *known, is *state) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, ok := s.known[key]
	if was != before && ok && was.at >= is.at {
		return
	}
	if !ok && len(s.known) >= mostKnown {
		for other := range s.known {
			delete(s.known, other)
			break
		}
	}
	s.known[key] = &known{state: is.withoutPayload()}
}

// doubt makes the next write read first.
func (s *Store) doubt(key tenure.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.known[key]; was != nil {
		s.known[key] = &known{state: was.state, doubted: true}
	}
}

// List returns at most limit objects of a type whose IDs come after the given one, in the order of
// the IDs' bytes. It reads all Leases of the type. It finds a Lease by the key that is stored in it,
// even if only another process's [Config.Leases] has its name.
func (s *Store) List(ctx context.Context, objectType, after string, limit int) (found []tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: list", objectType)
	if err := storekit.CheckList(objectType, after, limit); err != nil {
		return nil, err
	}
	objects := make(map[string]tenure.Object)
	err = s.each(ctx, ofType+"="+hashOf(objectType), func(key tenure.Key, l lease) {
		is, err := decode(key, l)
		if err != nil || key.Type != objectType || key.ID <= after || is.version() == 0 {
			return
		}
		_, configured := s.cfg.Leases[key]
		_, listed := objects[key.ID]
		if s.name(key) == l.Metadata.Name || !configured && !listed {
			objects[key.ID] = is.tenureObject(key)
		}
	})
	found = slices.Collect(maps.Values(objects))
	slices.SortFunc(found, func(a, b tenure.Object) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	return found[:min(limit, len(found))], err
}

// Types returns at most limit types of the objects in the store, in the order of their bytes. It reads
// all Leases of the store.
func (s *Store) Types(ctx context.Context, limit int) (types []string, err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: list", "types")
	err = s.each(ctx, ofType, func(key tenure.Key, l lease) {
		if is, err := decode(key, l); err == nil && is.version() != 0 {
			types = append(types, key.Type)
		}
	})
	slices.Sort(types)
	types = slices.Compact(types)
	return types[:min(limit, len(types))], err
}

// each calls do for each Lease of the store that matches a selector.
func (s *Store) each(ctx context.Context, selector string, do func(tenure.Key, lease)) error {
	ctx, cancel, err := s.begin(ctx)
	defer cancel()
	query := url.Values{"labelSelector": {selector}, "limit": {"500"}}
	for err == nil {
		var page leaseList
		if err = s.client.send(ctx, http.MethodGet, "", query, nil, &page); err != nil {
			break
		}
		for _, l := range page.Items {
			if key, ok := l.keyIn(); ok {
				do(key, l)
			}
		}
		if page.Metadata.Continue == "" {
			break
		}
		query.Set("continue", page.Metadata.Continue)
	}
	return err
}

type leaseList struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []lease `json:"items"`
}
