package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/etcdtenure"
)

// etcdServer is one etcd server, which keeps all revisions: its keys are the ledger as well.
type etcdServer struct {
	server
	objectsOnly
	etcd     *rig.Etcd
	snapshot string           // a file
	kv       *clientv3.Client // without a proxy, as the store
	store    *etcdtenure.Store
	audited  *audit // the audit before the snapshot was restored
	since    int64  // the revision of the snapshot
}

const etcdPrefix = "tenure/"

// newEtcd starts a server, whose files and log are in dir.
func newEtcd(ctx context.Context, dir string) (db *etcdServer, err error) {
	db = &etcdServer{snapshot: filepath.Join(dir, "snapshot")}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.close())
		}
	}()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return db, err
	}
	if db.etcd, err = rig.NewEtcd(ctx, dir); err != nil {
		return db, err
	}
	db.server = server{&db.etcd.Server, "all"}
	if db.kv, err = clientv3.New(clientv3.Config{Endpoints: []string{db.URL.String()}, BackoffWaitBetween: 20 * time.Millisecond, Logger: zap.NewNop()}); err != nil {
		return db, err
	}
	db.Answers = func(ctx context.Context) error { // this client is connected again, too
		if conn := db.kv.ActiveConnection(); conn != nil {
			conn.ResetConnectBackoff()
		}
		_, err := db.kv.Get(ctx, etcdPrefix)
		return err
	}
	if err := db.Start(ctx); err != nil {
		return db, err
	}
	if db.store, err = db.open(); err != nil {
		return db, err
	}
	return db, db.store.Migrate(ctx)
}

func (db *etcdServer) open() (*etcdtenure.Store, error) {
	return etcdtenure.New(db.kv, etcdtenure.Config{Logger: slog.New(slog.DiscardHandler)})
}

func (db *etcdServer) replica(_ int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	proxy, err := rig.NewProxy(db.URL.Host, nil)
	if err != nil {
		return cfg, nil, err
	}
	cfg.URL, cfg.Pace, cfg.Crowd = "etcd://"+proxy.Addr(), 100*time.Millisecond, 2
	return cfg, proxy, nil
}

// openEtcd is for a replica.
func openEtcd(ctx context.Context, cfg replicaConfig) (backend, error) {
	store, err := etcdtenure.Open(ctx, cfg.URL, clientv3.Config{}, etcdtenure.Config{})
	if err != nil {
		return nil, err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return &objectsBackend{objects: store, closed: store.Close}, nil
}

func (db *etcdServer) kinds() []faultKind {
	kinds := append(networkKinds(), db.stopKinds()...)
	return append(kinds, faultKind{name: renewedByCopy, group: "server", weight: 3, begin: renewByCopy(renewObjectAsCopy(db.store))})
}

const snapshotRestored = "restored from a snapshot"

// final restores the server from a snapshot: what was written since then is lost, but no token
// may go back. As the README of etcdtenure demands, the server stays down for the longest TTL.
func (db *etcdServer) final(ctx context.Context, p *phase) error {
	if err := db.saveSnapshot(ctx); err != nil {
		return err
	}
	terms, _ := p.record.terms()
	for _, v := range p.victims(replicas) { // the lease changes hands after the snapshot
		if err := v.resign(); err != nil {
			return err
		}
	}
	p.awaitJob(ctx, 6*p.ttl, func(term string) bool { return !slices.Contains(terms, term) })
	pause(ctx, p.ttl/3) // for some writes, as below
	f := &fault{kind: snapshotRestored, target: "all", from: monotonic(), episode: -1}
	p.note([]*fault{f})
	for _, v := range p.processes {
		v.proxy.Set(rig.Weather{Refuse: true})
	}
	var err error
	if db.audited, err = db.read(ctx); err != nil {
		return err
	}
	db.audited.until = int64(f.from)
	if err := errors.Join(db.End(syscall.SIGKILL), db.etcd.Restore(ctx, db.snapshot, "restored")); err != nil {
		return err
	}
	pause(ctx, max(p.ttl, crowdTTL))
	if err := db.Start(ctx); err != nil {
		return err
	}
	is, err := db.kv.Get(ctx, etcdPrefix)
	if err != nil {
		return err
	}
	db.since = is.Header.Revision
	for _, v := range p.processes {
		v.proxy.Set(rig.Weather{})
	}
	f.to = monotonic()
	p.log("%s: %s of %s for %v", p.name, f.kind, f.target, (f.to - f.from).Round(time.Millisecond))
	p.awaitHolder(ctx, 6*p.ttl)
	pause(ctx, p.ttl/3)
	return nil
}

func (db *etcdServer) saveSnapshot(ctx context.Context) error {
	from, err := db.kv.Snapshot(ctx)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(db.snapshot)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}

// history returns all revisions of objects, which are in the order of the commits, and how many
// of them are older than the restored snapshot.
func (db *etcdServer) history(ctx context.Context) (history []change, old int, err error) {
	is, err := db.kv.Get(ctx, etcdPrefix)
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type epoch struct {
		Above    int64 `json:"above"` // what is added to revisions, see the package etcdtenure
		revision int64
	}
	var epochs []epoch
	var last int64
	before := map[string]change{}
	watch := db.kv.Watch(ctx, etcdPrefix, clientv3.WithPrefix(), clientv3.WithRev(1))
	for last < is.Header.Revision {
		seen, ok := <-watch
		if err := seen.Err(); err != nil || !ok {
			return nil, 0, fmt.Errorf("the watch has ended: %w", cmp.Or(err, ctx.Err()))
		}
		for _, e := range seen.Events {
			key := string(e.Kv.Key)
			last = e.Kv.ModRevision
			switch {
			case key == etcdPrefix+"epoch":
				next := epoch{revision: last}
				if err := json.Unmarshal(e.Kv.Value, &next); err != nil {
					return nil, 0, err
				}
				epochs = append(epochs, next)
			case strings.HasPrefix(key, etcdPrefix+"o/"):
				c := change{key: before[key].key}
				if e.Type == clientv3.EventTypePut {
					if c, err = decodeChange(e.Kv.Value); err != nil {
						return nil, 0, err
					}
				}
				c.version = last
				before[key] = c
				history = append(history, c)
				if last <= db.since {
					old = len(history)
				}
			}
		}
	}
	for i, c := range history {
		for _, e := range epochs {
			// The first writes that reach a restored server happen in the snapshot's epoch, and
			// are answered by an error. Their versions are those of the next epoch.
			if e.revision < c.version || i >= old {
				history[i].version = e.Above + c.version
			}
		}
	}
	return history, old, nil
}

func (db *etcdServer) audit(ctx context.Context) (*audit, error) {
	now, err := db.read(ctx)
	if err != nil || db.audited == nil {
		return now, err
	}
	leases := map[string]bool{}
	for _, e := range db.audited.ledger {
		if e.kind == ledgerBegin && !leases[e.lease] {
			leases[e.lease] = true
			db.audited.ledger = append(db.audited.ledger, entry{kind: ledgerRestored, lease: e.lease, term: now.revived[e.lease]})
		}
	}
	db.audited.ledger = append(db.audited.ledger, now.ledger...) // tokens must rise beyond the restored snapshot
	return db.audited, nil
}

// read returns the audit of what was written since the restored snapshot.
func (db *etcdServer) read(ctx context.Context) (*audit, error) {
	history, old, err := db.history(ctx)
	if err != nil {
		return nil, err
	}
	a := &audit{fit: true}
	if a.ledger, err = ledgerOf(history, old); err != nil {
		return nil, err
	}
	if a.revived, err = standing(history[:old]); err != nil {
		return nil, err
	}
	store, err := db.open() // which has not known the server as it was before the snapshot was restored
	if err != nil {
		return nil, err
	}
	return a, errors.Join(a.readObjects(ctx, store), store.Close())
}

func (db *etcdServer) close() error {
	var err error
	if db.store != nil {
		err = db.store.Close()
	}
	if db.kv != nil {
		err = errors.Join(err, db.kv.Close())
	}
	if db.etcd != nil {
		err = errors.Join(err, db.End(syscall.SIGKILL))
	}
	return err
}
