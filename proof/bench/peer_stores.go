package main

import (
	"context"
	"log/slog"

	natsclient "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	_ "modernc.org/sqlite" // tenure.OpenSQLite uses it

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/etcdtenure"
	"github.com/tenurelib/tenure/natstenure"
)

var (
	tenureSQLitePeer = storePeer("tenure-sqlite", "this library, on a SQLite file that its replicas share", onSQLite, func(ctx context.Context, path string) (tenure.Store, func() error, error) {
		store, err := tenure.OpenSQLite(ctx, path, tenure.SQLiteConfig{Shared: true, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return nil, nil, err
		}
		return store, store.Close, nil
	})
	tenureEtcdPeer = storePeer("tenure-etcd", "this library, on etcd", onEtcd, func(_ context.Context, url string) (tenure.Store, func() error, error) {
		client, err := etcdClient(url)
		if err != nil {
			return nil, nil, err
		}
		store, err := etcdtenure.New(client, etcdtenure.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			client.Close()
			return nil, nil, err
		}
		return store, func() error { store.Close(); return client.Close() }, nil
	})
	tenureNATSPeer = storePeer("tenure-nats", "this library, on NATS JetStream", onNATS, func(_ context.Context, url string) (tenure.Store, func() error, error) {
		js, closeConn, err := openNATS(url)
		if err != nil {
			return nil, nil, err
		}
		store, err := natstenure.New(js, natstenure.Config{SyncAlways: true, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			closeConn()
			return nil, nil, err
		}
		return store, func() error { store.Close(); closeConn(); return nil }, nil
	})
)

func openNATS(url string) (js jetstream.JetStream, closeConn func(), err error) {
	conn, err := natsclient.Connect(url)
	if err != nil {
		return nil, nil, err
	}
	js, err = jetstream.New(conn)
	return js, conn.Close, err
}

// storePeer is this library on a store that is not Postgres.
func storePeer(name, about string, on place, open func(ctx context.Context, url string) (tenure.Store, func() error, error)) peer {
	return peer{
		name:    name,
		about:   about,
		on:      on,
		expires: on != onSQLite, // nothing comes between a replica and its file
		prepare: func(ctx context.Context, url string) error {
			store, closeStore, err := open(ctx, url)
			if err != nil {
				return err
			}
			defer closeStore()
			return store.(interface{ Migrate(context.Context) error }).Migrate(ctx)
		},
		open: func(ctx context.Context, o options) (*replica, error) {
			store, closeStore, err := open(ctx, o.url)
			if err != nil {
				return nil, err
			}
			return tenureReplica(store, closeStore, o), nil
		},
	}
}
