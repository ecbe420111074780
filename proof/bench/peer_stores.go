package main

import (
	"context"
	"log/slog"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	_ "modernc.org/sqlite" // tenure.OpenSQLite uses it

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// database is a store with what a replica needs besides.
type database interface {
	tenure.Store
	Migrate(ctx context.Context) error
	Close() error
}

var (
	tenureSQLitePeer = storePeer("tenure-sqlite", "this library, on a SQLite file that its replicas share", onSQLite, 0, func(ctx context.Context, path string) (database, error) {
		return tenure.OpenSQLite(ctx, path, tenure.SQLiteConfig{Shared: true, Logger: slog.New(slog.DiscardHandler)})
	})
	tenureEtcdPeer = storePeer("tenure-etcd", "this library, on etcd", onEtcd, etcdHandPeer.settles, func(ctx context.Context, url string) (database, error) {
		return etcdtenure.Open(ctx, strings.Replace(url, "http:", "etcd:", 1), clientv3.Config{Logger: zap.NewNop()}, etcdtenure.Config{Logger: slog.New(slog.DiscardHandler)})
	})
	tenureNATSPeer = storePeer("tenure-nats", "this library, on NATS JetStream", onNATS, 0, func(ctx context.Context, url string) (database, error) {
		return natstenure.Open(ctx, url, natstenure.Config{SyncAlways: true, Logger: slog.New(slog.DiscardHandler)})
	})
)

// storePeer is this library on a store that is not Postgres. On etcd its handovers have the rhythm of those by hand.
func storePeer(name, about string, on place, settles time.Duration, open func(ctx context.Context, url string) (database, error)) peer {
	return peer{
		name:    name,
		about:   about,
		on:      on,
		expires: on != onSQLite, // nothing comes between a replica and its file
		settles: settles,
		prepare: func(ctx context.Context, url string) error {
			store, err := open(ctx, url)
			if err != nil {
				return err
			}
			defer store.Close()
			return store.Migrate(ctx)
		},
		open: func(ctx context.Context, o options) (*replica, error) {
			store, err := open(ctx, o.url)
			if err != nil {
				return nil, err
			}
			return tenureReplica(store, o), nil
		},
	}
}
