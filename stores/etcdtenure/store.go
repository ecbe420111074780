package etcdtenure

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Config configures a [Store]. The zero value is ready to use.
type Config struct {
	// Prefix begins all keys of the store, which belong to it alone. It must end in a slash.
	// Default "tenure/".
	Prefix string

	Logger *slog.Logger // default slog.Default()
}

// Store keeps objects in etcd. It implements [tenure.Store], [tenure.Lister],
// [tenure.Fencer] and [tenure.Watcher]. All methods are safe for concurrent use.
type Store struct {
	*shared
	term *tenure.Term // whose fence the writes have to pass; nil: none
}

// shared is shared by a store and the fenced stores made from it.
type shared struct {
	client *clientv3.Client
	owned  bool // Open has made the client
	cfg    Config

	mu       sync.Mutex
	epoch    epoch // once it has been read
	newest   int64 // the greatest revision that we know of the epoch's cluster
	wentBack bool  // the cluster has since reported an older one
	known    map[tenure.Key]known
	watches  *storekit.Feeds
	groups   writeGroups
	stream   int             // of the watches; each number is another stream
	connects time.Time       // when the client was last made to connect
	closed   context.Context // done when the store is closed
	close    context.CancelCauseFunc
}

// known is an object as this process last saw it.
type known struct {
	state
	at int64 // the revision of the cluster at that time
}

// New returns a store on a client, with its credentials and TLS. The client remains the caller's.
// New does no I/O; call [Store.Migrate] before the first use.
func New(client *clientv3.Client, cfg Config) (*Store, error) {
	if client == nil {
		return nil, fmt.Errorf("etcdtenure: new store: %w: client is nil", tenure.ErrInvalid)
	}
	cfg.Prefix = cmp.Or(cfg.Prefix, "tenure/")
	cfg.Logger = storekit.Logger(cfg.Logger)
	if !strings.HasSuffix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("etcdtenure: new store: %w: Prefix %q does not end in a slash", tenure.ErrInvalid, cfg.Prefix)
	}
	s := &shared{client: client, cfg: cfg, known: make(map[tenure.Key]known)}
	s.closed, s.close = context.WithCancelCause(context.Background())
	store := &Store{shared: s}
	s.watches = storekit.NewFeeds(store.follow, cfg.Logger)
	return store, nil
}

// Open returns a store on a client of its own, which [Store.Close] closes. The URL is
// etcd://host:port,host:port or, with TLS, etcds://…, with user:password@ before the hosts; a
// path, if there is one, is the Prefix. With TLS, the parameters ca, cert and key name PEM files,
// see [storekit.URL.TLS], as in etcds://host/?ca=FILE. Everything else is in the client's config,
// whose Endpoints are ignored; the URL takes precedence over it. Unless the config says otherwise,
// the client gives up on a server that is silent for 15 s. Open returns [tenure.ErrInvalid] before
// it connects, and connects only if there is a user name. Call [Store.Migrate] before the first
// use.
func Open(ctx context.Context, url string, client clientv3.Config, cfg Config) (*Store, error) {
	store, err := open(ctx, url, client, cfg)
	if err != nil {
		return nil, fmt.Errorf("etcdtenure: open: %w", err)
	}
	return store, nil
}

func open(ctx context.Context, text string, config clientv3.Config, cfg Config) (*Store, error) {
	u, err := storekit.ParseURL(text, []string{"etcd", "etcds"}, []string{"ca", "cert", "key"})
	if err != nil {
		return nil, err
	}
	scheme := "http://"
	if u.Scheme == "etcds" {
		scheme = "https://"
		secure, err := u.TLS()
		if err != nil {
			return nil, err
		}
		config.TLS = cmp.Or(secure, config.TLS, &tls.Config{MinVersion: tls.VersionTLS12})
	} else if config.TLS != nil || len(u.Parameters) > 0 { // they are all for TLS
		return nil, fmt.Errorf("%w: TLS needs an etcds:// URL", tenure.ErrInvalid)
	}
	if u.User != nil {
		password, ok := u.User.Password()
		if !ok {
			return nil, fmt.Errorf("%w: the URL has a user without a password", tenure.ErrInvalid)
		}
		config.Username, config.Password = u.User.Username(), password
	}
	config.Endpoints = nil
	for _, host := range u.Hosts {
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), "2379")
		}
		config.Endpoints = append(config.Endpoints, scheme+host)
	}
	if u.Path != "" {
		cfg.Prefix = u.Path + "/"
	}
	config.DialKeepAliveTime = cmp.Or(config.DialKeepAliveTime, 10*time.Second)
	config.DialKeepAliveTimeout = cmp.Or(config.DialKeepAliveTimeout, 5*time.Second)
	config.DialTimeout = cmp.Or(config.DialTimeout, requestTimeout)
	if deadline, ok := ctx.Deadline(); ok {
		config.DialTimeout = min(config.DialTimeout, max(time.Until(deadline), time.Millisecond))
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	client, err := clientv3.New(config)
	if errors.Is(err, context.DeadlineExceeded) && config.Username != "" { // it could not log in
		config.Username, config.Password = "", ""
		if client, failed := clientv3.New(config); failed == nil {
			defer client.Close()
			return nil, withReason(ctx, client.ActiveConnection(), err)
		}
	}
	if err != nil {
		return nil, explained(err)
	}
	store, err := New(client, cfg)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	store.owned = true
	return store, nil
}

// Migrate prepares the cluster for the store. It may be called at every start, by many processes at
// once. A [tenure.ErrSetup] names what is unsuitable.
//
// The versions of a store that Migrate begins are above the time in microseconds, so they continue
// above those of an earlier store, unless the clock is wrong.
func (s *Store) Migrate(ctx context.Context) (err error) {
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	defer storekit.OpError(ctx, &err, "etcdtenure: migrate", "prefix "+s.cfg.Prefix)
	if err := s.oldServer(ctx); err != nil {
		return err
	}
	if err := s.begin(ctx); err != nil {
		return err
	}
	_, err = s.ready(ctx)
	return err
}

// begin begins the first epoch, if there is none.
func (s *Store) begin(ctx context.Context) error {
	key := s.cfg.Prefix + ofEpoch
	s.connectNow()
	is, err := s.client.Get(requiringLeader(ctx), key)
	if err != nil {
		return s.why(ctx, err)
	}
	if len(is.Kvs) > 0 {
		return nil
	}
	s.mu.Lock()
	first := beginEpoch(is.Header.ClusterId, s.epoch.version(s.newest)) // it is 0 at a start
	s.epoch, s.newest, s.wentBack = epoch{}, 0, false
	s.mu.Unlock()
	_, err = s.client.Txn(requiringLeader(ctx)).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, first.text)).Commit()
	return explained(err)
}

// oldest is the oldest version of a server whose members cannot disagree after a crash.
var oldest = [3]int{3, 5, 3}

// oldServer asks the servers that can be reached for their versions.
func (s *Store) oldServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	endpoints := s.client.Endpoints()
	errs := make([]error, len(endpoints))
	var all sync.WaitGroup
	for i, endpoint := range endpoints {
		all.Go(func() {
			is, err := s.client.Status(ctx, endpoint)
			if err != nil {
				return // if no server can be reached, the next call returns the error
			}
			errs[i] = tooOld(endpoint, is.Version)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func tooOld(endpoint, version string) error {
	var is [3]int
	if _, err := fmt.Sscanf(version, "%d.%d.%d", &is[0], &is[1], &is[2]); err != nil || slices.Compare(is[:], oldest[:]) >= 0 {
		return nil
	}
	return fmt.Errorf("%w: the server %s has version %s and must have %d.%d.%d or later", tenure.ErrSetup, endpoint, version, oldest[0], oldest[1], oldest[2])
}

// ready returns the epoch, which it reads once. If the cluster is not the one for which the epoch
// was written, or its revisions have gone back, it was restored from a snapshot or is a copy. ready
// then begins the next epoch, whose versions are above all that were given before.
func (s *Store) ready(ctx context.Context) (epoch, error) {
	s.mu.Lock()
	had, newest, wentBack := s.epoch, s.newest, s.wentBack
	s.mu.Unlock()
	if s.closed.Err() != nil {
		return epoch{}, context.Cause(s.closed)
	}
	if had.text != "" && !wentBack {
		return had, nil
	}
	key := s.cfg.Prefix + ofEpoch
	for {
		s.connectNow()
		resp, err := s.client.Get(requiringLeader(ctx), key)
		if err != nil {
			return epoch{}, s.why(ctx, err)
		}
		if len(resp.Kvs) == 0 {
			return epoch{}, storekit.NotMigrated(fmt.Errorf("there is no key %s", key))
		}
		is, err := decodeEpoch(resp.Kvs[0].Value)
		if err != nil {
			return epoch{}, fmt.Errorf("%w: the key %s can't be read: remove it, and call Migrate (%w)", tenure.ErrSetup, key, err)
		}
		if is.Cluster == resp.Header.ClusterId && !(wentBack && is == had) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.epoch, s.newest, s.wentBack = is, resp.Header.Revision, false
			clear(s.known)
			return is, nil
		}
		next := beginEpoch(resp.Header.ClusterId, is.version(max(newest, resp.Header.Revision)))
		s.cfg.Logger.Warn("the etcd cluster was restored or copied; tokens go on above the old ones, but what was written since the snapshot is lost",
			"prefix", s.cfg.Prefix, "cluster", fmt.Sprintf("%x", next.Cluster), "revision", resp.Header.Revision, "above", next.Above)
		_, err = s.client.Txn(requiringLeader(ctx)).If(clientv3.Compare(clientv3.Value(key), "=", is.text)).
			Then(clientv3.OpPut(key, next.text)).Commit()
		if err != nil {
			return epoch{}, explained(err)
		}
	}
}

// errWentBack says that the cluster is older than what this process has seen, so that a write may
// have got a version that was given before. The next call begins another epoch.
var errWentBack = errors.New("the cluster was restored from a snapshot, or is another one")

// follows checks that an answer is not older than what was known when the request was sent.
func (s *shared) follows(e epoch, newest int64, header *etcdserverpb.ResponseHeader) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch != e {
		return nil // we know better by now
	}
	if header.ClusterId != e.Cluster || header.Revision < newest {
		s.wentBack = true
		return fmt.Errorf("%w: revision %d of cluster %x came after %d of %x", errWentBack, header.Revision, header.ClusterId, newest, e.Cluster)
	}
	s.newest = max(s.newest, header.Revision)
	return nil
}

// overtaken forgets an epoch that is over.
func (s *shared) overtaken(e epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch == e {
		s.epoch, s.newest, s.wentBack = epoch{}, 0, false
	}
}

var errClosed = fmt.Errorf("%w: Close was called", tenure.ErrClosed)

// String names the prefix and the servers.
func (s *Store) String() string {
	hosts := s.client.Endpoints()
	for i, endpoint := range hosts {
		hosts[i] = endpoint[strings.LastIndex(endpoint, "/")+1:]
	}
	return "prefix " + s.cfg.Prefix + " on " + strings.Join(hosts, ",")
}

// Close ends the subscriptions, and closes the client if [Open] made it. A client that was
// given to [New] remains open.
func (s *Store) Close() error {
	s.close(errClosed)
	s.watches.Close()
	storekit.Flush(s.cfg.Logger)
	if s.owned {
		return s.client.Close()
	}
	return nil
}

// Traits says that the store is Clockless: etcd does not say how long ago a key was written. CreatedAt
// and UpdatedAt come from the writers' clocks.
func (s *Store) Traits() tenure.Traits { return tenure.Traits{Clockless: true} }

// Lineage returns the zero Lineage: etcd does not lose what it has acknowledged.
func (s *Store) Lineage(context.Context) (tenure.Lineage, error) { return tenure.Lineage{}, nil }

const requestTimeout = 5 * time.Second

// Get returns the object, or [tenure.ErrNotFound].
func (s *Store) Get(ctx context.Context, key tenure.Key) (obj tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "etcdtenure: get", key)
	if err := cmp.Or(key.Validate(), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	st, obj, _, err := s.read(ctx, key)
	if err == nil && st.revision == 0 {
		err = tenure.ErrNotFound
	}
	return obj, err
}

// read returns what the cluster has for a key, and at which revision of the cluster.
func (s *Store) read(ctx context.Context, key tenure.Key) (st state, obj tenure.Object, at int64, err error) {
	e, resp, err := s.look(ctx, clientv3.OpGet(s.keyOf(ofObjects, key)))
	if err != nil {
		return st, obj, 0, err
	}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		st, obj = decode(e, key, kvs[0])
	}
	s.saw(e, key, st, resp.Header.Revision)
	return st, obj, resp.Header.Revision, nil
}

// mostKnown limits how many objects a store remembers.
const mostKnown = 4096

// saw remembers the state of an object at a revision of the cluster.
func (s *shared) saw(e epoch, key tenure.Key, st state, at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, ok := s.known[key]
	if s.epoch != e || ok && was.at > at {
		return
	}
	if !ok && len(s.known) >= mostKnown {
		for other := range s.known {
			delete(s.known, other)
			break
		}
	}
	s.known[key] = known{st, at}
}

// recall returns what is known about an object.
func (s *shared) recall(e epoch, key tenure.Key) state {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch != e {
		return state{}
	}
	return s.known[key].state
}

func (s *shared) forget(key tenure.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, key)
}

// List returns at most limit objects of a type whose IDs come after the given one, in the order of
// the IDs' bytes.
func (s *Store) List(ctx context.Context, objectType, after string, limit int) (found []tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "etcdtenure: list", objectType)
	if err := cmp.Or(storekit.CheckList(objectType, after, limit), ctx.Err()); err != nil {
		return nil, err
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	from := s.keyOf(ofObjects, tenure.Key{Type: objectType, ID: after})
	end := clientv3.GetPrefixRangeEnd(s.keyOf(ofObjects, tenure.Key{Type: objectType}))
	if after != "" {
		from += "\x00"
	}
	for {
		e, resp, err := s.look(ctx, clientv3.OpGet(from, clientv3.WithRange(end), clientv3.WithLimit(int64(limit-len(found)))))
		if err != nil {
			return nil, err
		}
		page := resp.Responses[0].GetResponseRange()
		for _, kv := range page.Kvs {
			from = string(kv.Key) + "\x00"
			key := tenure.Key{Type: objectType, ID: s.idOf(kv.Key)}
			if key.Validate() == nil { // other programs may write anything
				_, obj := decode(e, key, kv)
				found = append(found, obj)
			}
		}
		if len(found) >= limit || !page.More {
			return found, nil
		}
	}
}
