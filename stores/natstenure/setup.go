package natstenure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Migrate creates the stream if it is missing. It may be called at every start, by many processes
// at once. A [tenure.ErrSetup] names what is unsuitable in an existing stream, or in the server.
//
// The versions of a stream that Migrate creates begin with the time in microseconds, so they
// continue above those of an earlier stream of that name, unless the clock is wrong.
func (s *Store) Migrate(ctx context.Context) (err error) {
	defer storekit.Flush(s.cfg.Logger)
	ctx, cancel := s.limited(ctx)
	defer cancel()
	defer s.opError(ctx, &err, "migrate", "stream "+s.cfg.Stream)
	err = s.oldServer()
	if err == nil {
		_, err = s.js.Stream(ctx, s.cfg.Stream)
		err = explained(err)
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		_, err = s.js.CreateStream(ctx, s.streamConfig())
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another process was faster
			err = nil
		}
	}
	if err == nil {
		_, err = s.ready(ctx)
	}
	if err != nil {
		return err
	}
	if !s.cfg.SyncAlways {
		remedy := "set Config.SyncAlways"
		if s.reports != nil {
			remedy = "add sync=always to the parameters of the store's URL"
		}
		s.cfg.Logger.Warn("unless the NATS servers run with sync_interval: always, a lease may be held twice after a power failure; "+
			"if they do, "+remedy, "stream", s.cfg.Stream)
	}
	return nil
}

func (s *Store) streamConfig() jetstream.StreamConfig {
	bucket := s.cfg.Bucket != ""
	return jetstream.StreamConfig{
		Name:        s.cfg.Stream,
		Description: "leases and objects of github.com/tenurelib/tenure",
		Subjects:    []string{s.prefix + ".>"},
		Storage:     jetstream.FileStorage,
		Replicas:    s.cfg.Replicas,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		FirstSeq:    uint64(time.Now().UnixMicro()),

		MaxMsgsPerSubject:  1,
		AllowAtomicPublish: !bucket,
		AllowDirect:        bucket, // like all buckets
		AllowRollup:        bucket,
		DenyDelete:         true, // a purge remains possible, for an operator who has to repair something
	}
}

// oldServer refuses a server whose atomic batches can't be relied on. A bucket needs 2.11.2: when a server of 2.10.27, 2.11.1
// or before restarts, it deletes all entries of a bucket that Migrate has created, if the first one was never written again.
// See https://github.com/nats-io/nats-server/pull/6753.
func (s *Store) oldServer() error {
	is, oldest, remedy := [3]int{}, [3]int{2, 12, 0}, "; for a store with Config.Bucket, 2.11.2 is enough"
	if s.cfg.Bucket != "" {
		oldest, remedy = [3]int{2, 11, 2}, ""
	}
	version := s.nc.ConnectedServerVersion()
	if _, err := fmt.Sscanf(version, "%d.%d.%d", &is[0], &is[1], &is[2]); err != nil || slices.Compare(is[:], oldest[:]) >= 0 {
		return nil // without a connection, the next call returns the error
	}
	return fmt.Errorf("%w: the server has version %s and must have %d.%d.%d or later%s", tenure.ErrSetup, version, oldest[0], oldest[1], oldest[2], remedy)
}

// ready returns the stream after it has been checked once.
func (s *Store) ready(ctx context.Context) (jetstream.Stream, error) {
	s.mu.Lock()
	stream := s.stream
	s.mu.Unlock()
	if s.closed.Err() != nil {
		return nil, context.Cause(s.closed)
	}
	if stream != nil {
		return stream, nil
	}
	stream, err := s.js.Stream(ctx, s.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, storekit.NotMigrated(fmt.Errorf("there is no stream %s", s.cfg.Stream))
	}
	if err != nil {
		return nil, explained(err)
	}
	is := stream.CachedInfo().Config
	if err := errors.Join(s.oldServer(), s.misfit(is)); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream = stream
	return stream, nil
}

// smallest is the least maximum value size that a bucket may have, because every store accepts
// payloads of 64 KiB.
const smallest = 80 << 10

// misfit names the settings with which the stream could lose data or return outdated data.
func (s *Store) misfit(is jetstream.StreamConfig) error {
	var errs []error
	for _, must := range []struct {
		ok  bool
		set string
	}{
		{slices.Contains(is.Subjects, s.prefix+".>"), "subjects " + s.prefix + ".>"},
		{is.Storage == jetstream.FileStorage, "file storage"},
		{is.PersistMode == jetstream.DefaultPersistMode, "the default persist mode"},
		{is.Retention == jetstream.LimitsPolicy, "retention by limits"},
		{is.MaxAge == 0, "no maximum age, which is a bucket's TTL"},
		// Servers from 2.11 on add this to their answers. The stream's leader answers, which need not be the server that the
		// client reaches.
		{s.cfg.Bucket == "" || is.Metadata["_nats.level"] != "", "a leader of version 2.11 or later"},
		{s.cfg.Bucket == "" || is.MaxMsgSize <= 0 || is.MaxMsgSize >= smallest, fmt.Sprintf("no maximum value size below %d bytes", smallest)},
		{is.Discard == jetstream.DiscardNew || is.MaxMsgs <= 0 && is.MaxBytes <= 0, "discard new, or no limits"},
		{!is.DiscardNewPerSubject, "old messages of a subject replaced by new ones"},
		{is.AllowAtomicPublish || s.cfg.Bucket != "", "atomic batch publishing allowed"},
		{!is.AllowDirect || s.cfg.Bucket != "", "no direct gets, which may return outdated data"},
		{!is.NoAck && !is.Sealed, "acknowledgements, and not be sealed"},
		{is.Mirror == nil && len(is.Sources) == 0 && is.SubjectTransform == nil, "no mirror, sources or transforms"},
	} {
		if !must.ok {
			errs = append(errs, fmt.Errorf("%w: stream %s must have %s", tenure.ErrSetup, s.cfg.Stream, must.set))
		}
	}
	return errors.Join(errs...)
}

// explained says what to do if there is no JetStream. It is only for requests that do not concern
// one stream, because those are also unanswered while the stream has no leader.
func explained(err error) error {
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return fmt.Errorf("%w: the account that the client connects to must have JetStream enabled (%w)", tenure.ErrSetup, err)
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w: no server that the client reaches has JetStream enabled: set jetstream in its configuration (%w)", tenure.ErrSetup, err)
	}
	return err
}
