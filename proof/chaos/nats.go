package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/stores/natstenure"
)

// natsStream is one NATS server with sync_interval: always, and its stream. Its files are on a
// small file system of their own if that can be mounted, otherwise in an ordinary directory.
type natsStream struct {
	server
	objectsOnly
	dir     string
	mounted bool
	nc      *nats.Conn // without a proxy, as all below
	js      jetstream.JetStream
	store   *natstenure.Store
}

func newNATS(ctx context.Context, log string) (db *natsStream, err error) {
	db = &natsStream{}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.close())
		}
	}()
	if db.dir, err = os.MkdirTemp("", "tenure-chaos-nats-"); err != nil {
		return db, err
	}
	db.mounted = unix.Mount("tenure-chaos", db.dir, "tmpfs", 0, "size=128m") == nil
	nats, err := rig.NewNATS(ctx, db.dir, log)
	if err != nil {
		return db, err
	}
	db.server = server{nats, "all"}
	if err := db.Start(ctx); err != nil {
		return db, err
	}
	return db, db.prepare(ctx)
}

// prepare creates the stream as Migrate would, except that it keeps all messages, and not just
// the last one of each subject: so it is the ledger as well.
func (db *natsStream) prepare(ctx context.Context) (err error) {
	if db.nc, err = nats.Connect(db.URL.String(), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond)); err != nil {
		return err
	}
	if db.js, err = jetstream.New(db.nc); err != nil {
		return err
	}
	db.store, err = natstenure.New(db.js, natstenure.Config{SyncAlways: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if err := db.store.Migrate(ctx); err != nil {
		return err
	}
	return db.reconfigure(ctx, func(cfg *jetstream.StreamConfig, _ jetstream.StreamState) { cfg.MaxMsgsPerSubject = -1 })
}

const (
	natsStreamName = "TENURE"

	streamFull     = "stream full"
	streamDiskFull = "disk full (tmpfs), and a restart"
)

// reconfigure changes the configuration of the stream.
func (db *natsStream) reconfigure(ctx context.Context, change func(*jetstream.StreamConfig, jetstream.StreamState)) error {
	stream, err := db.js.Stream(ctx, natsStreamName)
	if err != nil {
		return err
	}
	is := stream.CachedInfo()
	change(&is.Config, is.State)
	_, err = db.js.UpdateStream(ctx, is.Config)
	return err
}

func (db *natsStream) replica(_ int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	proxy, err := rig.NewProxy(db.URL.Host, nil)
	if err != nil {
		return cfg, nil, err
	}
	cfg.URL, cfg.Pace, cfg.Crowd = "nats://"+proxy.Addr(), 100*time.Millisecond, 2
	return cfg, proxy, nil
}

// openNATS is for a replica.
func openNATS(ctx context.Context, cfg replicaConfig) (backend, error) {
	nc, err := nats.Connect(cfg.URL, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	store, err := natstenure.New(js, natstenure.Config{SyncAlways: true})
	if err != nil {
		nc.Close()
		return nil, err
	}
	closed := func() error {
		err := store.Close()
		nc.Close()
		return err
	}
	if err := store.Migrate(ctx); err != nil {
		return nil, errors.Join(err, closed())
	}
	return &objectsBackend{objects: store, closed: closed}, nil
}

func (db *natsStream) kinds() []faultKind {
	kinds := append(networkKinds(), db.stopKinds()...)
	kinds = append(kinds,
		faultKind{name: renewedByCopy, group: "server", weight: 3, begin: renewByCopy(renewObjectAsCopy(db.store))},
		faultKind{name: streamFull, group: "server", weight: 4, begin: db.fillStream})
	if db.mounted {
		kinds = append(kinds, faultKind{name: streamDiskFull, group: "server", weight: 4, begin: db.fillDisk})
	}
	return kinds
}

// fillStream lets the stream have not a byte more than it has.
func (db *natsStream) fillStream(ctx context.Context, _ *phase) (string, ending, error) {
	err := db.reconfigure(ctx, func(cfg *jetstream.StreamConfig, is jetstream.StreamState) { cfg.MaxBytes = int64(is.Bytes) })
	return "all", func() (time.Duration, error) {
		return 0, db.reconfigure(ctx, func(cfg *jetstream.StreamConfig, _ jetstream.StreamState) { cfg.MaxBytes = -1 })
	}, err
}

// fillDisk fills the disk. The server then disables JetStream, until it is started again with
// some room.
func (db *natsStream) fillDisk(ctx context.Context, _ *phase) (string, ending, error) {
	ballast, err := os.Create(filepath.Join(db.dir, "ballast"))
	if err != nil {
		return "", nil, err
	}
	err = inflate(ballast)
	return "all", func() (time.Duration, error) {
		return 0, errors.Join(ballast.Close(), os.Remove(ballast.Name()), db.End(syscall.SIGTERM), db.Start(ctx))
	}, err
}

func (db *natsStream) final(context.Context, *phase) error { return nil }

// history returns all messages of objects, which are in the order of the commits.
func (db *natsStream) history(ctx context.Context) (history []change, err error) {
	stream, err := db.js.Stream(ctx, natsStreamName)
	if err != nil {
		return nil, err
	}
	last := stream.CachedInfo().State.LastSeq
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, err
		}
		about, err := msg.Metadata()
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(msg.Subject(), natsStreamName+".o.") {
			c, err := decodeChange(msg.Data())
			if err != nil {
				return nil, err
			}
			c.version, c.at = int64(about.Sequence.Stream), about.Timestamp
			history = append(history, c)
		}
		if about.Sequence.Stream >= last {
			return history, nil
		}
	}
}

func (db *natsStream) audit(ctx context.Context) (*audit, error) {
	history, err := db.history(ctx)
	if err != nil {
		return nil, err
	}
	return auditOf(ctx, history, db.store)
}

func (db *natsStream) close() error {
	var err error
	if db.store != nil {
		err = db.store.Close()
	}
	if db.nc != nil {
		db.nc.Close()
	}
	if db.server.Server != nil {
		err = errors.Join(err, db.End(syscall.SIGKILL))
	}
	if db.mounted {
		err = errors.Join(err, unix.Unmount(db.dir, 0))
	}
	return errors.Join(err, os.RemoveAll(db.dir))
}
