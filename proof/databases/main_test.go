package databases_test

import (
	"testing"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
