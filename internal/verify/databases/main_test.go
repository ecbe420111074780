package databases_test

import (
	"testing"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
